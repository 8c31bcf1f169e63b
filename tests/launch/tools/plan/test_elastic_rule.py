"""The parallelism planner in virtual time on RollPacker's Figure 12(a): responses grow, and the engine with them."""

import dataclasses

import numpy as np
import pytest

from actor.elastic import ElasticBounds, ElasticPolicy, StepStats
from actor.engine_protocol import EngineSize
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.sim.sim_engine import NEVER, SimEngine

WEIGHTS = 142_000
PROMPT, PLACES, MAX_SIZE = 512, 256, 8


class BareRule:
    """The paper's rule alone (section 4.2): twice the size after 1.05 times the preemptions of the step before."""

    def __init__(self) -> None:
        self.size, self.last = 1, None

    def observe(self, num_preempted, lengths, kv_tokens):
        if self.last is not None and num_preempted > 1.05 * self.last and self.size < MAX_SIZE:
            self.size, self.last = 2 * self.size, None
        else:
            self.last = num_preempted
        return self.size, PLACES


class Ours:
    """The planner's own code; an engine of another size begins with the config's sequences."""

    def __init__(self) -> None:
        bounds = ElasticBounds(min_sequences=10, max_sequences=PLACES, max_tensor_parallel_size=MAX_SIZE)
        size = EngineSize(max_num_seqs=PLACES, tensor_parallel_size=1, kv_tokens=1, weights_kv_tokens=WEIGHTS)
        self.share = ElasticPolicy(size=size, bounds=bounds, max_sequences=PLACES, tensor_parallel_size=1)

    def observe(self, num_preempted, lengths, kv_tokens):
        share, before = self.share, self.share.tensor_parallel_size
        share.size = dataclasses.replace(share.size, tensor_parallel_size=before, kv_tokens=kv_tokens)
        decision = share.observe(
            StepStats(
                num_preempted=num_preempted,
                num_finished=len(lengths),
                kv_usage_peak=1.0 if num_preempted else 0.7,
                is_full=len(lengths) >= share.max_sequences,
                lengths=lengths,
                is_race=True,
            )
        )
        if decision.tensor_parallel_size != before:
            share.max_sequences = PLACES
        return decision.tensor_parallel_size, share.max_sequences


def rollout_s(planner, *, kv_tokens, caps, seed):
    """Seconds of all steps, and the size in each: 100 responses a device, a fifth of them long."""
    rng = np.random.default_rng(seed)
    size, places, total, sizes = 1, PLACES, 0.0, []
    for cap in caps:
        capacity = size * (kv_tokens + WEIGHTS) - WEIGHTS
        speed = size**0.7
        engine = SimEngine(
            EngineProfile(
                running=(1.0, 256.0),
                tokens_per_s=(60.0 * speed, 256 * 20.0 * speed),
                max_num_seqs=places,
                kv_capacity_tokens=capacity,
            )
        )
        num = 100 * size
        short = np.minimum(cap, cap / 8 * np.exp(0.5 * rng.standard_normal(num)))
        long = cap * (1 / 8 + 7 / 8 * np.minimum(1, 1.5 * rng.random(num)))
        responses = np.maximum(1, np.where(rng.random(num) < 0.2, long, short)).astype(np.int32)
        for i, tokens in enumerate(responses.tolist()):
            engine.add(0.0, str(i), priority=i, prompt_tokens=PROMPT, response_tokens=tokens)
        last_s = 0.0
        while (at_s := engine.next_event_s()) < NEVER:
            engine.advance(at_s)
            last_s = at_s
        sizes.append(size)
        total += last_s
        lengths = np.stack([np.full(num, PROMPT, np.int32), responses], 1)
        size, places = planner.observe(engine.num_preemptions, lengths, capacity)
    return total, sizes


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kv_tokens", [60_000, 100_000, 224_000])
def test_planner_is_not_slower_than_the_papers_bare_rule(kv_tokens, seed):
    caps = range(8_000, 33_000, 1_000)
    ours, sizes = rollout_s(Ours(), kv_tokens=kv_tokens, caps=caps, seed=seed)
    bare, _ = rollout_s(BareRule(), kv_tokens=kv_tokens, caps=caps, seed=seed)
    assert ours <= bare, sizes


@pytest.mark.parametrize("kv_tokens", [224_000, 400_000])
def test_planner_leaves_the_size_where_lengths_stay_and_the_cache_holds_them(kv_tokens):
    _, sizes = rollout_s(Ours(), kv_tokens=kv_tokens, caps=[8_000] * 12, seed=0)
    assert sizes == [1] * 12
