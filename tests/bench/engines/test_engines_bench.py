"""The parts of the fleet bench that are not the system's own."""

import asyncio
from typing import Any

import numpy as np
import pytest

from launch.tools.plan.profile import EngineProfile, LearnerProfile
from tests.bench.engines import measure
from tests.bench.engines.batch_rollout import roll_out
from tests.bench.engines.setups import (
    BATCH,
    NUM_ENGINES,
    SERIAL,
    TAIL_BATCHING,
    K,
    R,
)
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.replay import HashRewards

PROMPT = np.arange(3, dtype=np.int32)


class Engine:
    """Remembers what it was asked; everything ends at once."""

    def __init__(self, log: list[tuple[int, str]], index: int) -> None:
        self.log, self.index = log, index

    async def sample(self, prompt_tokens, sampling, *, request_id: str, priority: int) -> None:
        self.log.append((self.index, request_id))


def test_batch_rollout_deals_whole_groups_and_makes_up_for_flat_ones_in_further_batches():
    log: list[tuple[int, str]] = []
    engines: list[Any] = [Engine(log, i) for i in range(NUM_ENGINES)]
    is_flat = [n in (3, 5, R) for n in range(2 * R)]  # two of the first batch; then one of the two that follow
    (seconds,) = asyncio.run(roll_out(engines, [PROMPT] * 2 * R, is_flat, BATCH.config(1), num_rounds=1))
    groups = [request.split(".")[0] for _, request in log]
    assert sorted({int(g) for g in groups}) == list(range(R + 3)) and len(log) == (R + 3) * K
    assert all(len({e for e, r in log if r.startswith(g)}) == 1 for g in groups)  # a group is one engine's
    counts = [sum(e == i for e, r in log if int(r[:9]) < R) for i in range(NUM_ENGINES)]
    assert set(counts) == {R // NUM_ENGINES * K} and seconds >= 0


def test_prediction_of_a_batch_is_its_slowest_engine(monkeypatch):
    # A token a second for each sequence, however many run: a batch takes its longest response, wherever it is.
    profile = EngineProfile(running=(1.0, 64.0), tokens_per_s=(1.0, 64.0), max_num_seqs=64)
    monkeypatch.setattr(measure, "engine_profile", lambda: profile)
    prompts = [[i, i + 1] for i in range(R)]
    longest = max(BATCH.lengths.tokens(np.asarray(p, np.int32), i) for p in prompts for i in range(K))
    problems = [(p, f"answer {n}") for n, p in enumerate(prompts)] * 8
    monkeypatch.setattr(HashRewards, "is_flat", lambda self, answer: False)
    assert measure.predict_batches_s(BATCH, problems, 2) == pytest.approx(longest, rel=0.05)


def test_ideal_of_tail_batching_is_of_short_and_long_rounds_and_their_training(monkeypatch):
    # Of 40 prompts the last 8 take ten tokens, all others one: four short rounds of a second, and a long one of ten.
    profile = EngineProfile(running=(1.0, 32.0), tokens_per_s=(1.0, 32.0), max_num_seqs=32)
    monkeypatch.setattr(measure, "engine_profile", lambda: profile)
    monkeypatch.setattr(Lengths, "tokens", lambda self, prompt, index: 10 if prompt[0] % 40 >= R else 1)
    problems = [([n, 0, 0], "") for n in range(200)]
    learner = LearnerProfile(seconds_per_token=0.001)
    cost = R * K * 0.001  # of a token of each response, and there are three of the prompt besides
    serial = measure.ideal_s(SERIAL, problems, 1, learner=learner)
    assert serial == pytest.approx(1 + 4 * cost)
    assert measure.ideal_s(TAIL_BATCHING, problems, 5, learner=learner) == pytest.approx(
        (4 * (1 + 4 * cost) + 10 + 13 * cost) / 5
    )
