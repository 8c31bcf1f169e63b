"""Routed experts that a real vLLM engine returns, and the learner's logprobs with them; transformers is the oracle."""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest

from actor.engine_protocol import Sample
from actor.environments.transcript import EpisodeRequest, EpisodeTurns
from actor.rewards.scorer import NO_REWARD
from actor.serving import build_group
from bridge.rollout_types import Group, Sampling, Version
from learner.distributed.sharding import make_mesh
from learner.parity import max_abs_dlogprob
from learner.update.packing import PackedBatch
from learner.update.train_step import build_train_step
from tests.actor.fakes import until
from tests.bridge.factories import captured, make_ticket
from tests.integration.support import models
from tests.integration.support.engines import MAX_NUM_SEQS, TEMPERATURE, Bench, EngineKind, for_engines

BOUND = 1e-4
PROMPT = np.arange(150, dtype=np.int32) % 50 + 20  # more than a block, which later requests find in the cache
ENGINE = EngineKind(family="qwen3_moe", tied=False, prefix_caching=True, num_kv_blocks=14, routing_replay=True)
pytestmark = [pytest.mark.integration, pytest.mark.engine, for_engines([ENGINE])]


def assert_chosen(bench: Bench, version: Version, tokens: np.ndarray, routed: np.ndarray) -> None:
    """The rows are the two largest router logits of these tokens, wherever rounding can't change them."""
    logits = models.reference_router_logits(bench.folder, bench.weights[version], tokens)[: len(routed)]
    ranked = np.sort(logits, -1)
    is_clear = ranked[..., -2] - ranked[..., -3] > 1e-3
    assert is_clear.mean() > 0.9
    want = np.sort(np.argsort(logits, -1)[..., -2:], -1)
    np.testing.assert_array_equal(np.sort(routed, -1)[is_clear], want[is_clear])


def group_of(samples: list[Sample]) -> Group:
    ticket = make_ticket(prompt_tokens=PROMPT, num_samples=len(samples))
    members = {i: (sample, NO_REWARD, None) for i, sample in enumerate(samples)}
    return build_group(ticket, members, actor="a", started_s=0.0, finished_s=1.0)


def test_every_token_has_its_experts_also_of_cached_prompts_and_preempted_requests(bench: Bench):
    async def body():
        version, before = await bench.update(), bench.engine.stats.num_preempted
        samples = await asyncio.gather(*(bench.sample(PROMPT, max_tokens=300) for _ in range(MAX_NUM_SEQS + 3)))
        assert bench.engine.stats.num_preempted > before
        return version, samples

    version, samples = bench.run(body())
    assert all(captured(s).shape == (150 + 300 - 1, 2, 2) for s in samples)
    assert captured(samples[0]).dtype == np.uint8
    for sample in samples:  # the last ones found the prompt's first block in the cache
        assert_chosen(bench, version, np.concatenate([PROMPT, sample.tokens]), captured(sample))


def test_token_keeps_the_experts_of_the_weights_that_were_served_when_it_was_computed(bench: Bench):
    async def body():
        older = await bench.update()
        tasks = [asyncio.create_task(bench.sample(PROMPT, max_tokens=300)) for _ in range(3)]
        target = bench.engine.num_sampled_tokens + 200
        await until(lambda: bench.engine.num_sampled_tokens >= target, "tokens", deadline_s=120)
        await bench.update()
        return older, await asyncio.gather(*tasks)

    older, samples = bench.run(body())
    for sample in group_of(samples).rollouts:  # which checks the number of rows
        num_older = 150 + int(np.count_nonzero(sample.token_versions == older.step)) - 1
        assert 150 <= num_older < len(captured(sample))
        tokens = np.concatenate([PROMPT, sample.tokens])
        assert_chosen(bench, older, tokens, captured(sample)[:num_older])
        with pytest.raises(AssertionError):
            assert_chosen(bench, older, tokens, captured(sample))


def test_episode_has_the_experts_of_all_its_turns(bench: Bench):
    episode = EpisodeRequest(
        environment="",
        prompt_tokens=PROMPT,
        row={},
        sampling=Sampling(max_tokens=200, ignore_eos=True, temperature=TEMPERATURE),
        request_id="routed",
        priority=0,
    )
    turns = EpisodeTurns(bench.engine, episode, request_id="routed", budget_tokens=200, max_turn_tokens=40)

    async def body():
        version = await bench.update()
        for _ in range(3):
            await turns.take()
            turns.transcript.observe(np.array([20, 21, 22], np.int32))
        await turns.take()
        return version, turns.transcript.end("stop")

    version, sample = bench.run(body())
    assert captured(sample).shape == (150 + 169 - 1, 2, 2)
    assert_chosen(bench, version, np.concatenate([PROMPT, sample.tokens]), captured(sample))


def test_replay_removes_the_mismatch_of_a_router_that_is_near_ties(bench: Bench):
    async def body():
        change = functools.partial(models.near_ties, seed=1, noise=1e-7)
        version = await bench.update(change=change)
        return version, await asyncio.gather(*(bench.sample(PROMPT, max_tokens=100) for _ in range(4)))

    version, samples = bench.run(body())
    architecture, weights = models.learner_params(bench.folder, bench.weights[version])
    steps = build_train_step(architecture, bench.config, make_mesh())

    def replayed(batch: PackedBatch) -> np.ndarray:
        return np.asarray(steps.score(weights, batch))

    def routed_alone(batch: PackedBatch) -> np.ndarray:
        assert batch.routed_experts is not None
        return replayed(dataclasses.replace(batch, routed_experts=np.full_like(batch.routed_experts, -1)))

    group, packing = group_of(samples), bench.config.packing
    assert max_abs_dlogprob(replayed, group, packing, steps.routing) <= BOUND
    assert max_abs_dlogprob(routed_alone, group, packing, steps.routing) > 0.1
