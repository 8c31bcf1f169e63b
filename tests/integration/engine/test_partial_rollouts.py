"""Partial rollouts (publish.at_publish=abort_and_resume) on a real vLLM engine; transformers is the oracle."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from actor.engine_protocol import AbortedError, EngineDeadError, Sample
from tests.actor.fakes import until
from tests.integration.support.engines import MAX_NUM_SEQS, Bench, EngineKind, for_engines, spans

BOUND = 1e-4
NUM_KV_BLOCKS = 14  # of 128 tokens: eight sequences of 400 tokens want 32
PROMPT = np.array([20, 21, 22, 23], np.int32)
ENGINE = EngineKind(at_publish="abort_and_resume", prefix_caching=True, num_kv_blocks=NUM_KV_BLOCKS)
pytestmark = [pytest.mark.integration, pytest.mark.engine, for_engines([ENGINE])]


async def progress(bench: Bench, num_tokens: int) -> None:
    target = bench.engine.num_sampled_tokens + num_tokens
    await until(lambda: bench.engine.num_sampled_tokens >= target, f"{num_tokens} tokens", deadline_s=120)


def swapped(bench: Bench, requests, *, every: int, wanted: Callable[[list[int]], bool], seed: int | None = None):
    """The samples of `sample_under_swaps`, once the numbers of versions in them are as wanted.

    An engine that has a core to itself may be done before this process, which shares one, has made the updates.
    """
    found = []
    for _ in range(10):
        samples = bench.run(sample_under_swaps(bench, requests, every=every, seed=seed))
        found.append([len(spans(s)) for s in samples])
        if wanted(found[-1]):
            return samples
    raise AssertionError(f"versions in each sample, of ten tries: {found}")


async def sample_under_swaps(bench: Bench, requests, *, every: int, seed: int | None = None) -> list[Sample]:
    """Runs the requests; after each `every` tokens of theirs other weights are served (with a seed: the same)."""
    await bench.update(seed=seed)
    tasks = [asyncio.create_task(bench.sample(PROMPT, **r)) for r in requests]
    ending = asyncio.gather(*tasks)
    while True:
        moving = asyncio.create_task(progress(bench, every))
        await asyncio.wait({moving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            moving.cancel()
            return await ending
        await bench.update(seed=seed)


def test_resumed_greedy_responses_are_those_of_an_undisturbed_run(bench: Bench):
    # More than run at once: those in the engine's queue are ended and begun anew too.
    requests = [{"max_tokens": n, "temperature": 0.0} for n in range(40, 60)]

    async def undisturbed():
        await bench.update(seed=7)
        return await asyncio.gather(*(bench.sample(PROMPT, **r) for r in requests))

    calm = bench.run(undisturbed())
    disturbed = swapped(bench, requests, every=80, seed=7, wanted=lambda versions: max(versions) >= 3)
    for one, other in zip(calm, disturbed, strict=True):
        np.testing.assert_array_equal(other.tokens, one.tokens)
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=BOUND)
        assert other.finish == "length"


def test_every_span_is_what_its_weights_make_of_all_before_it(bench: Bench):
    requests = [{"max_tokens": 300}] * MAX_NUM_SEQS
    samples = swapped(bench, requests, every=500, wanted=lambda versions: min(versions) >= 2)
    assert all(s.tokens.size == 300 for s in samples)
    for sample in samples[:3]:
        for version, start, end in spans(sample):
            own = bench.reference(version, PROMPT, sample)[start:end]
            np.testing.assert_allclose(sample.logprobs[start:end], own, atol=BOUND)
        (_, start, end), (other, _, _) = spans(sample)[-1], spans(sample)[0]
        older = bench.reference(other, PROMPT, sample)[start:end]
        assert np.abs(sample.logprobs[start:end] - older).max() > 0.1  # the check would have seen them


def test_lengths_and_stop_tokens_hold_across_swaps(bench: Bench):
    stops = (5, 40, 77)
    exact = [{"max_tokens": n, "min_tokens": n, "ignore_eos": False} for n in range(1, 41)]
    free = [{"max_tokens": 200, "min_tokens": 20, "stop_token_ids": stops, "ignore_eos": False}] * 40
    samples = swapped(bench, exact + free, every=120, wanted=lambda versions: max(versions) >= 2)
    for n, sample in enumerate(samples[:40], start=1):
        assert sample.tokens.size == sample.logprobs.size == n and sample.finish == "length"
    ends = {*stops, 97}  # and the end-of-sequence token
    for sample in samples[40:]:
        assert sample.tokens.size >= 20 and not ends & set(sample.tokens[:-1].tolist())
        assert (sample.finish == "stop") == (int(sample.tokens[-1]) in ends)
        assert sample.finish == "stop" or sample.tokens.size == 200


def test_stats_are_those_of_a_cache_that_is_too_small(bench: Bench):
    async def body():
        await bench.update()
        before = bench.engine.stats
        tasks = [asyncio.create_task(bench.sample(PROMPT, max_tokens=400)) for _ in range(MAX_NUM_SEQS + 3)]
        await progress(bench, MAX_NUM_SEQS * 50)
        during = bench.engine.stats
        await asyncio.gather(*tasks)
        return before, during, bench.engine.stats

    before, during, after = bench.run(body())
    assert bench.engine.size.kv_tokens == pytest.approx(128 * NUM_KV_BLOCKS, rel=0.1)
    assert before.kv_usage_peak == 0.0
    assert during.num_running + during.num_waiting == MAX_NUM_SEQS + 3
    assert 0 < during.kv_usage <= during.kv_usage_peak <= 1
    assert after.num_preempted > before.num_preempted
    assert after.kv_usage_peak > 0.8 and (after.num_running, after.num_waiting, after.kv_usage) == (0, 0, 0.0)
    assert after.num_finished - before.num_finished == MAX_NUM_SEQS + 3
    assert after.num_sampled_tokens - before.num_sampled_tokens == 400 * (MAX_NUM_SEQS + 3)


def test_aborted_request_is_not_resumed(bench: Bench):
    async def body():
        await bench.update()
        bench.write()
        prefetched = await bench.client.prefetch()
        assert prefetched is not None
        tasks = [asyncio.create_task(bench.sample(PROMPT, request_id=f"a{i}", max_tokens=400)) for i in range(2)]
        await progress(bench, 20)
        swapping = asyncio.create_task(bench.client.swap(prefetched))
        await bench.engine.abort("a0")
        await swapping
        await bench.engine.abort("a1")
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(e) for e in bench.run(body())] == [AbortedError, AbortedError]


def test_failed_swap_ends_the_requests_that_wait_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The last one: the engine is dead after it."""

    async def body():
        await bench.update()
        bench.write()
        prefetched = await bench.client.prefetch()
        assert prefetched is not None
        tasks = [asyncio.create_task(bench.sample(PROMPT, max_tokens=400)) for _ in range(3)]
        await progress(bench, 20)

        async def failing(request: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(bench.engine._llm, "update_weights", failing)
        with pytest.raises(EngineDeadError, match="out of memory"):
            await bench.client.swap(prefetched)
        return await asyncio.gather(*tasks, bench.sample(PROMPT), return_exceptions=True)

    assert [type(e) for e in bench.run(body())] == [EngineDeadError] * 4
