"""What the bench of many processes makes of its runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest

from bridge.types import ActorReport, Heartbeat
from tests.bench.together import Run, aims_of, values_of
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


def met(alone: Run, together: Run, ray: Run) -> set[str]:
    return {key for key, aim in aims_of(values_of(alone, together, ray)).items() if not aim["met"]}


ALONE = run_of("alone", 0.7, groups={"actor-0": 9}, killed_at=0)


def test_difference_is_of_the_late_means_in_standard_errors_by_their_spread():
    # Means 0.7 and 0.6; 0.05 and 0.02 from them each way, so the means of two are off by 0.05 and 0.02.
    one = dataclasses.replace(ALONE, held_out=[(0, 0.1), (40, 0.2), (120, 0.65), (240, 0.75)], num_problems=1000)
    other = dataclasses.replace(ALONE, held_out=[(0, 0.1), (40, 0.5), (120, 0.58), (240, 0.62)], num_problems=1000)
    assert one.difference(other) == pytest.approx(0.1 / (0.05**2 + 0.02**2) ** 0.5)


def test_standard_error_is_no_less_than_of_right_and_wrong_answers():
    # 0.8 (1 - 0.8) / 400 answers = 0.0004
    even = dataclasses.replace(ALONE, held_out=[(0, 0.1), (120, 0.8), (240, 0.8)], num_problems=200)
    assert even.standard_error == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("ray", "missed"),
    [
        (run_of("ray", 0.69), set()),
        (run_of("ray", 0.60), {"ray_difference"}),
        (run_of("ray", 0.80), {"ray_difference"}),
        (run_of("ray", 0.69, killed_at=0), {"killed_and_back"}),
        (run_of("ray", 0.69, groups={**ENGINES, "actor-1-r1": 0}), {"killed_and_back"}),
        (run_of("ray", 0.69, groups={**ENGINES, "actor-2": 0}), {"engines_at_work"}),
        (dataclasses.replace(run_of("ray", 0.69), lost=1), {"lost"}),
        (dataclasses.replace(run_of("ray", 0.69), trained_twice=1), {"trained_twice"}),
    ],
)
def test_aims_are_missed_by_the_run_that_is_off(ray: Run, missed: set[str]):
    assert met(ALONE, run_of("together", 0.72), ray) == missed


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
