"""The parts of the fleet bench that are not the system's own."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Sampling, Version
from launch.tools.plan.profile import EngineProfile, LearnerProfile
from tests.bench.engines import measure
from tests.bench.engines.__main__ import AIMS, remarks_of, table_of, values_of
from tests.bench.engines.batch_rollout import roll_out
from tests.bench.engines.measure import Row
from tests.bench.engines.setups import (
    BATCH,
    NUM_ENGINES,
    PAIRS,
    QUEUE,
    ROLL_FLASH,
    SERIAL,
    TAIL_BATCHING,
    K,
    R,
    engine_profile,
)
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.paced_engine import PacedEngine
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


def test_batch_rollout_without_prompts_enough_is_refused():
    with pytest.raises(ValueError, match="prompts are too few"):
        asyncio.run(roll_out([], [PROMPT], [False], BATCH.config(1), num_rounds=1))


def test_prediction_of_a_batch_is_its_slowest_engine(monkeypatch):
    # A token a second for each sequence, however many run: a batch takes its longest response, wherever it is.
    profile = EngineProfile(running=(1.0, 64.0), tokens_per_s=(1.0, 64.0), max_num_seqs=64)
    monkeypatch.setattr(measure, "engine_profile", lambda: profile)
    prompts = [[i, i + 1] for i in range(R)]
    longest = max(BATCH.lengths.tokens(np.asarray(p, np.int32), i) for p in prompts for i in range(K))
    problems = [(p, f"answer {n}") for n, p in enumerate(prompts)] * 8
    monkeypatch.setattr(HashRewards, "is_flat", lambda self, answer: False)
    assert measure.predict_batches_s(BATCH, problems, 2) == pytest.approx(longest, rel=0.05)


def test_flat_share_is_of_the_prompts_and_always_the_same():
    rewards = HashRewards(0.25)
    flat = [rewards.is_flat(f"answer {n}") for n in range(4000)]
    assert np.mean(flat) == pytest.approx(0.25, abs=0.02) and flat == [
        rewards.is_flat(f"answer {n}") for n in range(4000)
    ]
    assert not any(HashRewards().is_flat(f"answer {n}") for n in range(100))


def test_rollout_is_from_a_rounds_first_ticket_to_its_last_group():
    def event(name: str, ts: float, dur: float = 0.0, **args: Any) -> dict[str, Any]:
        return {"name": name, "ts": ts * 1e6, "dur": dur * 1e6, "pid": 1, "args": args}

    events = [
        {"name": "process_name", "ts": 0, "pid": 1, "args": {"name": "actor-0"}},
        {"name": "process_name", "ts": 0, "pid": 2, "args": {"name": "actor-1"}},
        event("issue", 1, step=0),
        event("issue", 2, step=0),  # another for one without variance
        event("reward", 3, 1, kind="train", round=0),
        event("reward", 2, 1, kind="train", round=0),
        event("train", 3.5, step=0),
        event("train", 4.5, step=0),
        event("reward", 4, 2, kind="train", round=0),  # lost a race
        event("reward", 9, 1, kind="eval", round=0),
        event("issue", 10, step=1),
        event("reward", 14, 1, kind="train", round=1),
        event("train", 15, step=1),
    ]
    result: Any = type("Result", (), {"events": events, "steps": [{}, {}]})
    assert measure.rollout_s(result) == [3.0, 5.0]
    assert measure.tickets_of(result) == (0, 4)


def test_publish_costs_are_of_all_versions_but_the_first():
    def span(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"name": name, "ts": ts * 1e6, "dur": dur * 1e6, "pid": 1, "args": {}}

    events = [span("publish", 0, 5), span("pause", 3, 9), span("pause", 6, 9)]  # engines that had nothing to do
    result: Any = type("Result", (), {"events": events})
    with pytest.raises(ValueError, match="no version but the first"):
        measure.publish_costs(result)
    events += [span("publish", 20, 1), span("pause", 21.5, 0.25), span("pause", 22.5, 0.25), span("pause", 20.5, 0.25)]
    costs = measure.publish_costs(result)
    assert (costs.export_s, costs.prefetch_s, costs.pause_s) == (1.0, 0.5, 0.25)


def test_tail_batching_is_compared_with_what_differs_in_nothing_else():
    before, after = (setup.config(1) for setup in PAIRS["rollpacker_speedup"])
    races = {"overprovision_prompts": 1.25, "overprovision_samples": 1.25}
    assert dataclasses.replace(before.rounds, **races) == after.rounds
    assert dataclasses.replace(before, rounds=after.rounds, preset=after.preset) == after


def test_ideal_of_tail_batching_is_of_short_and_long_rounds_and_their_training(monkeypatch):
    # Of 40 prompts the last 8 take ten tokens, all others one: four short rounds of a second, and a long one of ten.
    profile = EngineProfile(running=(1.0, 32.0), tokens_per_s=(1.0, 32.0), max_num_seqs=32)
    monkeypatch.setattr(measure, "engine_profile", lambda: profile)
    monkeypatch.setattr(Lengths, "tokens", lambda self, prompt, index: 10 if prompt[0] % 40 >= R else 1)
    problems = [([n, 0, 0], "") for n in range(200)]
    learner = LearnerProfile(seconds_per_token=0.001)
    cost = R * K * 0.001  # of a token of each response, and there are three of the prompt besides
    serial = measure.ideal_s(SERIAL, problems, 1, learner=learner, publish=None)
    assert serial == pytest.approx(1 + 4 * cost)
    assert measure.ideal_s(TAIL_BATCHING, problems, 5, learner=learner) == pytest.approx(
        (4 * (1 + 4 * cost) + 10 + 13 * cost) / 5
    )


def test_values_are_each_pairs_speed_up_measured_and_predicted():
    names = {s.name for pair in PAIRS.values() for s in pair}
    rows = {name: Row(name=name, rounds_s=[2.0], predicted_s=2.0) for name in names}
    rows[BATCH.name] = Row(name=BATCH.name, rounds_s=[4.0, 6.0], predicted_s=4.0)
    values = values_of(rows)
    assert values["queue_scheduling_speedup"] == 2.5 and values["queue_scheduling_speedup_predicted"] == 2.0
    assert values["rollpacker_speedup"] == 1.0 and values["largest_prediction_error"] == pytest.approx(0.2)
    cells = {line[0]: line for line in table_of(rows).rows}
    assert cells[QUEUE.name][4] == "2.50" and cells[BATCH.name][4] == ""
    assert not any(key.endswith(("ideal", "gain_share")) for key in values)
    assert "rollpacker_and_streaming_speedup" in values and "rollpacker_and_streaming_speedup" not in AIMS
    for name, ideal_s in ((BATCH.name, 4.0), (QUEUE.name, 1.0)):
        rows[name] = dataclasses.replace(rows[name], ideal_s=ideal_s)
    values = values_of(rows)
    assert values["queue_scheduling_speedup_ideal"] == 4.0
    assert values["queue_scheduling_speedup_gain_share"] == pytest.approx(0.5)  # 1.5 of 3
    rows = {name: dataclasses.replace(row, ideal_s=float(2 + n)) for n, (name, row) in enumerate(rows.items())}
    said = "\n".join(remarks_of(values_of(rows)))
    assert all(f"`{key}` " in said for key in PAIRS)


def test_paced_engine_with_a_version_samples_without_an_update():
    async def body():
        engine = PacedEngine(engine_profile(), version=Version(incarnation=0, step=0))
        start = time.monotonic()
        sample = await engine.sample(PROMPT, Sampling(max_tokens=4), request_id="000000000.1", priority=0)
        return sample, time.monotonic() - start

    sample, seconds = asyncio.run(body())
    assert sample.tokens.size == 4 and seconds > 0
    assert set(sample.token_versions) == {Version(incarnation=0, step=0)}


def test_roll_flash_of_the_fleet_is_the_presets():
    config = ROLL_FLASH.config(1)
    assert (config.admission.async_ratio, config.admission.unit, config.publish.when) == (2.0, "sample", "every")
