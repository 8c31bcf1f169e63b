import fnmatch
import json

import pytest

from learner.metrics.metric_names import FAMILIES, METRICS, meaning, over_all_starts
from learner.metrics.metrics_writer import MetricsWriter, read_rows


def write(folder, *, restored_step=0, incarnation=0, steps=(), value=0.5):
    writer = MetricsWriter(folder, restored_step=restored_step, incarnation=incarnation)
    for step in steps:
        writer.write("step", step, {"loss": value}, groups=[f"g{step}"])
    writer.close()


def lines(file):
    return [json.loads(x) for x in file.read_text().splitlines()]


def test_write_row_is_on_disk_at_once_with_what_it_belongs_to(tmp_path):
    writer = MetricsWriter(tmp_path, restored_step=0, incarnation=3, clock=lambda: 1.8e9 + 0.12345)
    writer.write("step", 1, {"loss": 0.25, "tokens": 7}, groups=["a", "b"])
    about = {"kind": "step", "step": 1, "incarnation": 3, "time_s": 1800000000.123}
    assert lines(tmp_path / "metrics.jsonl") == [{**about, "loss": 0.25, "tokens": 7.0, "groups": ["a", "b"]}]
    assert not about.keys() & METRICS.keys()
    writer.close()


def test_write_unknown_name_is_refused_and_nothing_is_written(tmp_path):
    writer = MetricsWriter(tmp_path, restored_step=0, incarnation=0)
    with pytest.raises(KeyError, match=r"\['los', 'zzz'\]"):
        writer.write("step", 1, {"loss": 1.0, "zzz": 0.0, "los": 1.0})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("verifier", ["math", "my_judges.style:score", "anything/else"])
def test_write_scores_of_any_verifier_are_taken(tmp_path, verifier):
    writer = MetricsWriter(tmp_path, restored_step=0, incarnation=0)
    writer.write("step", 1, {f"rewards/{verifier}": 0.25})
    writer.write("eval", 1, {f"eval/rewards/{verifier}": 0.75})
    writer.close()
    (step, evaluation) = lines(tmp_path / "metrics.jsonl")
    assert step[f"rewards/{verifier}"] == 0.25 and evaluation[f"eval/rewards/{verifier}"] == 0.75


@pytest.mark.parametrize(
    "name", ["rewards/", "rewards", "reward/math", "eval/reward/math", "verdicts/okay", "Rewards/math"]
)
def test_write_misspelt_family_is_refused(tmp_path, name):
    writer = MetricsWriter(tmp_path, restored_step=0, incarnation=0)
    with pytest.raises(KeyError, match=name):
        writer.write("step", 1, {name: 1.0})
    writer.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_write_value_that_is_not_finite_is_null(tmp_path, value):
    write(tmp_path, steps=[1], value=value)
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert row["loss"] is None and "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_reopened_rows_beyond_the_restored_step_are_set_aside(tmp_path):
    write(tmp_path, steps=[1, 2, 3, 4, 5])
    write(tmp_path, restored_step=3, incarnation=1, steps=[4, 5, 6], value=0.75)
    rows = lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["incarnation"] for r in rows] == [0, 0, 0, 1, 1, 1]
    abandoned = lines(tmp_path / "metrics.abandoned.jsonl")
    assert [(r["step"], r["incarnation"], r["groups"]) for r in abandoned] == [(4, 0, ["g4"]), (5, 0, ["g5"])]


def test_reopened_again_and_again_abandoned_rows_add_up(tmp_path):
    write(tmp_path, steps=[1, 2])
    write(tmp_path, restored_step=1, incarnation=1, steps=[2, 3])
    write(tmp_path, restored_step=0, incarnation=2)
    assert lines(tmp_path / "metrics.jsonl") == []
    abandoned = lines(tmp_path / "metrics.abandoned.jsonl")
    assert [(r["step"], r["incarnation"]) for r in abandoned] == [(2, 0), (1, 0), (2, 1), (3, 1)]


def test_reopened_after_a_torn_last_line_goes_on_with_whole_rows(tmp_path):
    write(tmp_path, steps=[1, 2])
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert [r["step"] for r in read_rows(file)] == [1]
    write(tmp_path, restored_step=1, incarnation=1, steps=[2])
    assert [(r["step"], r["incarnation"]) for r in lines(file)] == [(1, 0), (2, 1)]


def test_read_rows_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m:2: not JSON"):
        read_rows(tmp_path / "m")


def test_metrics_every_name_has_a_meaning():
    assert all(METRICS.values())
    assert all(FAMILIES.values()) and meaning("rewards/math") == FAMILIES["rewards/?*"]
    assert meaning("loss") == METRICS["loss"] and meaning("los") is None
    assert not any(fnmatch.fnmatchcase(name, family) for name in METRICS for family in FAMILIES)


def test_counters_of_a_learners_start_are_summed_over_starts_and_those_of_the_store_are_not():
    counts = [(0, 1, 50), (0, 2, 90), (1, 3, 4), (1, 4, 10), (2, 5, 1)]
    rows = [
        {"incarnation": i, "step": s, "groups/dropped": n, "groups/reissued": n, "skipped_updates": n}
        for i, s, n in counts
    ]
    summed = over_all_starts(rows)
    assert [row["groups/dropped"] for row in summed] == [50, 90, 94, 100, 101]
    assert [(row["groups/reissued"], row["skipped_updates"]) for row in summed] == [(n, n) for *_, n in counts]
    assert rows[2]["groups/dropped"] == 4
