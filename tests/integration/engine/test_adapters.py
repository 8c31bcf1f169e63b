"""Adapters alone published to a real vLLM engine (publish.lora=adapter); transformers is the oracle, them merged."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actor.engine_protocol import AbortedError, Sample
from bridge.param_names import flatten, unflatten
from bridge.rollout_types import Version
from learner.distributed.sharding import make_mesh
from learner.model import hf_load as hf_io
from learner.model.lora import names_of
from learner.parity import max_abs_dlogprob
from learner.publish.publisher import Publisher
from learner.update.train_step import build_train_step
from tests.actor.fakes import until
from tests.bridge.snapshots.whole import write_whole
from tests.integration.engine.test_parity import sample_group
from tests.integration.support import models
from tests.integration.support.engines import LORA, Bench, EngineKind, for_engines, spans

BOUND = 1e-4
PROMPT = np.array([20, 21, 22, 23], np.int32)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.engine,
    for_engines([EngineKind(max_adapters=2, prefix_caching=True)]),
]


def assert_made_by_its_versions(bench: Bench, sample: Sample) -> None:
    for version, start, end in spans(sample):
        own = bench.reference(version, PROMPT, sample)[start:end]
        np.testing.assert_allclose(sample.logprobs[start:end], own, atol=BOUND)
        others = [v for v in bench.weights if v.incarnation == version.incarnation and v != version]
        for other in others[-2:]:
            if end - start > 8:
                was = bench.reference(other, PROMPT, sample)[start:end]
                assert np.abs(sample.logprobs[start:end] - was).max() > 0.1


async def begun(bench: Bench, num_tokens: int, **sampling) -> "asyncio.Task[Sample]":
    target = bench.engine.num_sampled_tokens + num_tokens
    task = asyncio.create_task(bench.sample(PROMPT, **sampling))
    # The engine tells of its tokens as it makes them.
    await until(lambda: bench.engine.num_sampled_tokens >= target, f"{num_tokens} tokens", deadline_s=120)
    return task


async def held(bench: Bench) -> int:
    return len(await bench.engine._llm.list_loras())


def test_a_running_request_ends_under_the_adapter_it_began_with_while_newer_ones_serve(bench: Bench):
    async def body():
        first = await bench.update()
        long = await begun(bench, 5, max_tokens=400)
        second = await bench.update()
        both = await held(bench)
        short = await bench.sample(PROMPT)
        assert not long.done()
        return first, second, both, await long, short

    first, second, both, long, short = bench.run(body())
    assert both == 2
    assert set(long.token_versions) == {first} and long.tokens.size == 400 and set(short.token_versions) == {second}
    assert_made_by_its_versions(bench, long)
    assert_made_by_its_versions(bench, short)

    adapters = bench.engine._adapters
    assert adapters is not None

    async def settled():
        await until(lambda: len(adapters._users) == 1, "the older one is gone", deadline_s=60)
        await asyncio.gather(*adapters._removals)
        return await held(bench)

    assert bench.run(settled()) == 1


def test_of_more_than_may_stay_the_oldest_ones_requests_go_on_under_the_new_one(bench: Bench):
    async def body():
        versions, tasks, most = [], [], 0
        for _ in range(5):
            versions.append(await bench.update())
            most = max(most, await held(bench))
            tasks.append(await begun(bench, 4, max_tokens=420))
        return versions, most, await asyncio.gather(*tasks)

    versions, most, samples = bench.run(body())
    assert most == 2  # as the engine was started with
    told = [[version for version, _, _ in spans(sample)] for sample in samples]
    print("versions of each response:", told)
    assert told[0][0] == versions[0] and len(told[0]) >= 2
    assert all(sorted(t) == t and len(s.tokens) == 420 for t, s in zip(told, samples, strict=True))
    for sample in samples[:2]:
        assert_made_by_its_versions(bench, sample)


def test_an_aborted_request_is_not_moved_and_a_refused_version_leaves_the_old_one(bench: Bench):
    async def body():
        version = await bench.update()
        task = await begun(bench, 4, max_tokens=400, request_id="gone")
        await bench.engine.abort("gone")
        with pytest.raises(AbortedError):
            await task
        wrong = dict(models.random_adapters(bench.model.tensors, seed=3))
        wrong[min(wrong)] = wrong[min(wrong)][:1]
        newer = bench.next_version()
        write_whole(bench.writer, newer, wrong, dtype="float32")
        bench.weights[newer] = models.read_weights(bench.folder)
        manifest = await bench.client.prefetch()
        assert manifest is None or not await bench.client.swap(manifest)
        assert bench.engine.version == version
        return version, await bench.sample(PROMPT)

    version, sample = bench.run(body())
    assert set(sample.token_versions) == {version}
    assert_made_by_its_versions(bench, sample)


def test_engine_logprobs_are_the_learners_after_every_publish_of_adapters(bench: Bench):
    config = bench.config
    model_config, base = hf_io.load(bench.folder, dtype="float32")
    steps = build_train_step(model_config, config, make_mesh(tensor=jax.device_count()))
    incarnation = max((v.incarnation for v in bench.weights), default=-1) + 1
    publisher = Publisher(
        bench.writer, names_of(model_config, LORA), config.publish, incarnation=incarnation, dtype="float32"
    )
    adapters, worst, stale, num_bytes = steps.init_adapters(), [], [], 0
    older = adapters

    async def serve():
        manifest = await bench.client.prefetch()
        assert manifest is not None and await bench.client.swap(manifest)
        return manifest.num_bytes

    for step in range(4):
        publisher.publish(adapters, step=step)
        publisher.finish()
        num_bytes = bench.run(serve())
        version = Version(incarnation=incarnation, step=step)
        bench.weights[version] = models.read_weights(bench.folder)  # for who asks what else there was
        group = bench.run(sample_group(bench, version))
        assert group.min_step == group.max_step == step
        for trained, found in ((adapters, worst), (older, stale)):
            score = functools.partial(_scored, steps, trained, base)
            found.append(max_abs_dlogprob(score, group, config.packing))
        random = np.random.default_rng(step)
        leaves = flatten(adapters)
        moved = {k: x + jnp.asarray(random.normal(0, 0.1, x.shape), jnp.float32) for k, x in leaves.items()}
        older, adapters = adapters, unflatten(moved)
    print("max |dlogprob| after each publish:", [f"{w:.1e}" for w in worst], "bytes", num_bytes)
    assert max(worst) <= BOUND and min(stale[1:]) > 0.1
    of_base = sum(x.nbytes for x in jax.tree.leaves(base))
    assert num_bytes < of_base / 10


def _scored(steps, adapters, base, batch):
    return np.asarray(steps.score(adapters, batch, base))


def test_the_engine_serves_another_run_from_its_first_version_on(bench: Bench):
    async def body():
        old = await bench.update()
        other = bench.engine.for_run(dataclasses.replace(bench.config, preset="other"))
        with pytest.raises(ValueError, match="no weights of this run"):
            await other.sample(PROMPT, _sampling(), request_id="early", priority=0)
        with pytest.raises(ValueError, match="lora are the same"):
            bench.engine.for_run(dataclasses.replace(bench.config, lora=dataclasses.replace(LORA, rank=2)))
        bench.client._engine, before = other, bench.engine
        bench.engine = other
        version = await bench.update()
        assert await held(bench) == 1
        sample = await bench.sample(PROMPT)
        return old, version, sample, before

    old, version, sample, _ = bench.run(body())
    assert set(sample.token_versions) == {version} != {old}
    assert_made_by_its_versions(bench, sample)


def _sampling():
    from bridge.rollout_types import Sampling

    return Sampling(max_tokens=4)
