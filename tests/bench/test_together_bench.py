"""What the bench of many processes makes of its runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest

from bridge.heartbeat_types import ActorReport, Heartbeat
from tests.bench.together import Run, values_of
from tests.integration.support.jobs import Job

ENGINES = {"actor-0": 3, "actor-1": 2, "actor-1-r1": 1, "actor-2": 4}


def run_of(name: str, end: float, *, groups: dict[str, int] = ENGINES, killed_at: int = 120, **more: Any) -> Run:
    given: dict[str, Any] = dict(
        num_problems=256, num_steps=240, trained_twice=0, lost=0, lag_max=1.0, parity=1e-6, wall_s=200.0, **more
    )
    return Run(
        name=name,
        held_out=[(0, 0.3), (120, end - 0.03), (240, end + 0.03)],
        groups=groups,
        killed_at=killed_at,
        **given,
    )


def alone_of(seed: int, end: float) -> Run:
    return run_of(f"alone_{seed}", end, groups={"actor-0": 9}, killed_at=0)


ALONE = [alone_of(0, 0.7), alone_of(1, 0.73), alone_of(2, 0.67)]
"""Their late means are 0.7 on average, and the first one ends at 0.73."""


def test_late_mean_is_held_against_all_runs_alone_and_the_end_against_the_first():
    # 256 answers each: 0.73 * 0.27 and 0.62 * 0.38 are 0.1971 and 0.2356.
    values = values_of(ALONE, run_of("together", 0.59), run_of("ray", 0.70))
    assert values["alone_reward_late"] == pytest.approx(0.70)
    assert (values["together_late_off"], values["ray_late_off"]) == (pytest.approx(0.11), pytest.approx(0.0))
    assert values["together_end_off"] == pytest.approx(0.11 / ((0.1971 + 0.2356) / 256) ** 0.5)
    assert values["ray_end_off"] == 0.0
    assert (values["alone_late_spread"], values["alone_end_spread"]) == (pytest.approx(0.06), pytest.approx(0.06))
    # 0.76 and 0.70
    assert values["alone_end_off"] == pytest.approx(0.06 / ((0.1824 + 0.21) / 256) ** 0.5)


def test_run_that_trained_a_group_twice_and_one_never_is_read_so(tmp_path: Path):
    step = {"kind": "step", "lag/max": 1.0}
    rows = [
        {"kind": "eval", "step": 0, "eval/reward": 0.25, "problems": 8},
        {**step, "step": 1, "groups": ["000000000", "000000001"]},
        {**step, "step": 2, "groups": ["000000001", "000000003"]},
        {"kind": "eval", "step": 2, "eval/reward": 0.5, "problems": 8},
        {"kind": "probe", "step": 2, "parity/max_abs_dlogprob": 2e-6},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {f.name: 0 for f in dataclasses.fields(ActorReport)} | {"num_groups": 4}
    beats = [
        Heartbeat(process="learner", role="learner", pid=1, time_s=1.0),
        Heartbeat(process="actor-0", role="actor", pid=2, time_s=1.0, report=ActorReport(**cast(Any, counts))),
    ]
    run = Run.of(Job(tmp_path, cast(Any, None)), beats, killed_at=0, wall_s=1.0)
    assert (run.trained_twice, run.lost, run.groups) == (1, 1, {"actor-0": 4})
    assert (run.start, run.late, run.parity) == (0.25, [0.5], 2e-6)
