"""Weight updates of a real vLLM engine, while it generates; transformers is the oracle."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from actor.engine_protocol import AbortedError, Sample, WeightLoadError
from actor.rewards.scorer import NO_REWARD
from actor.serving import build_group
from bridge import timeline
from bridge.rollout_types import Version
from configs.sections import LossConfig, PackingConfig
from learner.update.packing import pack_groups
from tests.actor.fakes import until
from tests.bridge.factories import make_ticket
from tests.integration.support.engines import ENGINES, MAX_NUM_SEQS, Bench, for_engines

pytestmark = [pytest.mark.integration, pytest.mark.engine, for_engines(ENGINES)]

BOUND = 1e-4
PROMPT = np.array([20, 21, 22, 23], np.int32)
LONG_PROMPT = np.random.default_rng(0).integers(0, 95, 300).astype(np.int32)  # more than two KV blocks


def spans(sample: Sample) -> list[tuple[Version, int]]:
    return [(v, len(list(run))) for v, run in itertools.groupby(sample.token_versions)]


def assert_serves(bench: Bench, version: Version, prompt: np.ndarray = PROMPT) -> None:
    sample = bench.run(bench.sample(prompt))
    assert spans(sample) == [(version, 24)]
    np.testing.assert_allclose(sample.logprobs, bench.reference(version, prompt, sample), atol=BOUND)


def assert_batches_carry_the_spans(samples: list[Sample], packing: PackingConfig) -> None:
    """A group of these samples, packed: every response token has the step that the engine stamped on it."""
    ticket = make_ticket(prompt_tokens=PROMPT, num_samples=len(samples))
    members = {i: (sample, NO_REWARD, None) for i, sample in enumerate(samples)}
    group = build_group(ticket, members, actor="a", started_s=0.0, finished_s=1.0)
    batches = pack_groups([group], packing=packing, loss=LossConfig(), max_response_tokens=400)
    rows = [(micro.batch, b) for micro in batches for b in range(packing.rows) if micro.batch.segment_ids[b].any()]
    assert len(rows) == len(samples)  # 404 of 512 tokens: a row holds one, in order, since all are of one length
    end = PROMPT.size + 400
    step = max(v.step for v, _ in spans(samples[0])) + 1  # where the learner trains them
    for (batch, b), sample in zip(rows, samples, strict=True):
        np.testing.assert_array_equal(batch.tokens[b, :end], np.concatenate([PROMPT, sample.tokens]))
        np.testing.assert_array_equal(np.flatnonzero(batch.loss_mask[b]), np.arange(PROMPT.size, end))
        np.testing.assert_array_equal(batch.behavior_logprobs[b, PROMPT.size : end], sample.logprobs)
        lag = step - np.asarray(batch.token_versions)[b, PROMPT.size : end]
        (oldest, num_oldest), (_, num_middle), (newest, num_newest) = spans(sample)
        assert (oldest.step, newest.step) == (step - 3, step - 1)
        np.testing.assert_array_equal(lag, np.repeat([3, 2, 1], [num_oldest, num_middle, num_newest]))


def test_sample_before_the_first_weights_is_refused(bench, monkeypatch):
    monkeypatch.setattr(bench.engine, "_version", None)  # as at its start: another module may have used it before
    with pytest.raises(ValueError, match="no weights"):
        bench.run(bench.sample(PROMPT))


def test_update_serves_the_new_weights_by_transformers_logprobs(bench):
    for _ in range(3):
        version = bench.run(bench.update())
        assert_serves(bench, version)
        assert_serves(bench, version, LONG_PROMPT)


def test_update_in_flight_stamps_every_token_with_its_weights(bench):
    async def body():
        first = await bench.update()
        before = bench.engine.num_sampled_tokens
        tasks = [asyncio.create_task(bench.sample(PROMPT, max_tokens=400)) for _ in range(MAX_NUM_SEQS)]
        versions, timings = [first], []
        for number in (1, 2):
            progress = before + number * MAX_NUM_SEQS * 20
            await until(lambda at=progress: bench.engine.num_sampled_tokens >= at, "tokens", deadline_s=120)
            versions.append(await bench.update())
            timings.append(dict(bench.client.timings))
        return versions, timings, await asyncio.gather(*tasks)

    for _ in range(10):
        versions, timings, samples = bench.run(body())
        found = [[v for v, _ in spans(sample)] for sample in samples]
        assert all(vs == sorted(set(vs)) and set(vs) <= set(versions) for vs in found)
        # An engine that has a core to itself may be done before this process has made the updates, and a request that
        # was taken up again late may get no token between two of them.
        if all(vs == versions for vs in found):
            break
    assert all(vs == versions for vs in found)  # three versions, in this order, no gap
    for sample in samples:
        assert sum(n for _, n in spans(sample)) == sample.tokens.size == 400
        assert sample.finish == "length"
    assert_batches_carry_the_spans(samples, bench.config.packing)
    num_first = spans(samples[0])[0][1]
    oldest = bench.reference(versions[0], PROMPT, samples[0])[:num_first]
    np.testing.assert_allclose(samples[0].logprobs[:num_first], oldest, atol=BOUND)
    publish = bench.config.publish
    if (
        publish.kv_cache == "recompute" or publish.at_publish == "abort_and_resume"
    ):  # then the newest tokens know nothing of older weights
        num_last = spans(samples[0])[-1][1]
        newest = bench.reference(versions[-1], PROMPT, samples[0])[-num_last:]
        np.testing.assert_allclose(samples[0].logprobs[-num_last:], newest, atol=BOUND)
    stats = bench.engine.stats
    assert stats.num_preempted == 0  # what an update throws out of the cache is no want of room
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0) and 0 < stats.kv_usage_peak < 1
    for timing in timings:
        assert 0 < timing["load_s"] < timing["pause_s"]
        print({name: f"{1000 * s:.1f} ms" for name, s in timing.items()})
    pauses = [e["args"]["version"] for e in timeline.read(bench.events) if e["name"] == "pause"]
    assert pauses[-2:] == [str(v) for v in versions[1:]]


def test_request_after_an_update_reuses_no_prompt_cache_of_older_weights(bench):
    """The engine can't drop cached blocks that a running request still holds."""

    async def body():
        await bench.update()
        bench.write()
        prefetched = await bench.client.prefetch()
        before = bench.engine.num_sampled_tokens
        holder = asyncio.create_task(bench.sample(LONG_PROMPT, max_tokens=200))
        await until(lambda: bench.engine.num_sampled_tokens > before, "the holder runs", deadline_s=120)
        assert await bench.client.swap(prefetched)
        is_held = not holder.done()
        sample = await bench.sample(LONG_PROMPT)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        return prefetched.version, sample, is_held

    for _ in range(10):
        version, sample, is_held = bench.run(body())
        np.testing.assert_allclose(sample.logprobs, bench.reference(version, LONG_PROMPT, sample), atol=BOUND)
        if is_held:  # An engine that has a core to itself may be done before the swap.
            break
    else:
        pytest.fail("no swap came while a request ran")


def test_corrupt_snapshot_is_refused_and_the_old_version_serves_on(bench):
    old = bench.run(bench.update())
    manifest = bench.write()
    num_refused = bench.client.num_refused
    tensor = next(t for t in manifest.tensors if "down_proj" in t.name)
    with open(bench.folder.parent / "snapshots" / manifest.shards[0].file.name, "r+b") as f:
        f.seek(tensor.offset_bytes + 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    assert bench.run(bench.client.prefetch()) is None
    assert bench.client.num_refused == num_refused + 1
    assert_serves(bench, old)
    assert_serves(bench, bench.run(bench.update()))  # and the next one is taken


def test_snapshot_that_does_not_fit_the_model_is_refused_by_the_engine_itself(bench):
    old = bench.run(bench.update())
    manifest = bench.write()
    local = bench.folder.parent / "copy" / "weights"
    with pytest.raises(WeightLoadError, match="expected version"):  # the worker finds another version in the file
        bench.run(bench.engine.swap_weights(local, manifest))
    fewer = dataclasses.replace(manifest, tensors=manifest.tensors[1:])
    with pytest.raises(WeightLoadError, match="differs from the model in 1 tensors"):
        bench.run(bench.engine.swap_weights(local, fewer))
    assert_serves(bench, old)
    assert_serves(bench, bench.run(bench.update()))


def test_abort_ends_the_request_and_frees_the_engine(bench):
    async def body():
        await bench.update()
        await bench.engine.abort("nobody")
        before = bench.engine.num_sampled_tokens
        task = asyncio.create_task(bench.sample(PROMPT, request_id="long", max_tokens=500))
        await until(lambda: bench.engine.num_sampled_tokens > before, "it runs", deadline_s=120)
        await bench.engine.abort("long")
        with pytest.raises(AbortedError):
            await task
        cancelled = asyncio.create_task(bench.sample(PROMPT, max_tokens=500))
        before = bench.engine.num_sampled_tokens
        await until(lambda: bench.engine.num_sampled_tokens > before, "it runs", deadline_s=120)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await asyncio.gather(*(bench.sample(PROMPT) for _ in range(2 * MAX_NUM_SEQS)))

    assert [s.tokens.size for s in bench.run(body())] == [24] * 2 * MAX_NUM_SEQS


def test_lower_priority_values_are_served_first(bench):
    async def body():
        await bench.update()
        order: list[int] = []

        async def one(priority: int) -> None:
            await bench.sample(PROMPT, priority=priority, max_tokens=60)
            order.append(priority)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_NUM_SEQS):
                tasks.create_task(one(0))
            await until(lambda: bench.engine.stats.num_running == MAX_NUM_SEQS, "it is full", deadline_s=120)
            for priority in (9, 1, -(2**31)):
                for _ in range(MAX_NUM_SEQS):
                    tasks.create_task(one(priority))
        return order

    order = bench.run(body())
    assert order == [0] * MAX_NUM_SEQS + [-(2**31)] * MAX_NUM_SEQS + [1] * MAX_NUM_SEQS + [9] * MAX_NUM_SEQS


def test_stop_token_ends_the_response_and_belongs_to_it(bench):
    bench.run(bench.update())
    some = tuple(range(0, 96, 3))  # and the end-of-sequence token, 97
    sample = bench.run(bench.sample(PROMPT, max_tokens=400, stop_token_ids=some, ignore_eos=False))
    assert sample.finish == "stop"
    assert sample.tokens[-1] in (*some, 97) and not set(sample.tokens[:-1].tolist()) & set(some)


def test_prompt_that_is_too_long_is_refused(bench):
    bench.run(bench.update())
    with pytest.raises(ValueError, match="longer than the maximum"):
        bench.run(bench.sample(np.zeros(600, np.int32)))


def test_higher_incarnation_is_served_though_its_step_is_lower(bench):
    following = bench.next_version()
    ahead = bench.run(bench.update(dataclasses.replace(following, step=following.step + 50)))
    back = Version(incarnation=ahead.incarnation + 1, step=ahead.step - 7)
    assert_serves(bench, bench.run(bench.update(back)))
    assert bench.run(bench.client.prefetch()) is None  # nothing newer: it stays
