"""What the bench of tasks makes of its runs."""

from tests.bench.rig import report
from tests.bench.task_learning import runs as task_learning


def made(task: str, seed: int, end: float, **last: float) -> task_learning.Run:
    rows = [
        {"kind": "eval", "eval/reward": 0.25, "eval/turns": 4.0},
        {"kind": "step", "sequences": 64.0, "verdicts/ok": 40.0, "verdicts/timeout": 1.0, "verdicts/hang": 0.0},
        {"kind": "step", "sequences": 64.0, "verdicts/ok": 50.0, "verdicts/timeout": 0.0, "verdicts/hang": 0.0},
        {"kind": "eval", "eval/reward": end, **last},
    ]
    summary = {"held_out": [[0, 0.25], [20, end]], "wall_s": 90.0}
    return task_learning.run_of(task, seed, summary, rows)


def test_run_counts_verdicts_over_all_its_updates():
    run = made("code", 1, 0.75)
    assert run.verdicts == {"ok": 90, "timeout": 1} and run.num_responses == 128
    assert run.held_out == [(0, 0.25), (20, 0.75)] and run.gain == 0.5 and run.turns == 1.0


def test_value_is_the_smallest_gain_of_a_task():
    some = [made("guess", 0, 0.75, **{"eval/turns": 3.5}), made("guess", 1, 0.5), made("code", 0, 0.35)]
    assert some[0].turns == 3.5
    values = task_learning.values_of(some)
    assert values == {"min_gain_guess": 0.25, "min_gain_code": 0.35 - 0.25}
    aims = {k: report.Aim(value=v, aim=task_learning.AIM_GAIN).to_json()["met"] for k, v in values.items()}
    assert aims == {"min_gain_guess": True, "min_gain_code": False}
    assert task_learning.table_of(some).rows[0][4:6] == ["+0.500", "0: 0.25, 20: 0.75"]
