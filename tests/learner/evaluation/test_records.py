import json

import numpy as np
import pytest

from bridge.rollout_types import Task
from learner.data.problem import Problem
from learner.evaluation import eval_summary
from learner.evaluation.eval_summary import EvaluationLog, read_evaluations, samples_of
from tests.bridge.factories import make_group, make_rollout, make_ticket


def record(name, step, **more):
    return {"format": eval_summary.FORMAT, "set": name, "step": step, **more}


def problems(count):
    task = Task.judged_by("exact", answer="7")
    return {n: Problem(f"question {n}", np.array([n], np.int32), task) for n in range(count)}


def groups(numbers, k=1):
    return {n: make_group(make_ticket("t", kind="eval", num_samples=k, order=-1)) for n in numbers}


def test_log_keeps_what_the_metrics_have_and_drops_what_a_restart_does_anew(tmp_path):
    file = tmp_path / "evaluations.jsonl"
    log = EvaluationLog(file, there=())
    for name, step in (("a", 0), ("b", 0), ("a", 4), ("b", 4)):
        log.add(record(name, step))
    log.close()
    with open(file, "a") as torn:
        torn.write('{"format": 1, "se')  # a kill in the middle of a line
    log = EvaluationLog(file, there=[("a", 0), ("b", 0), ("a", 4), ("c", 9)])
    log.add(record("b", 4, again=True))
    log.close()
    assert [(r["set"], r["step"], "again" in r) for r in read_evaluations(file)] == [
        ("a", 0, False),
        ("b", 0, False),
        ("a", 4, False),
        ("b", 4, True),
    ]


def test_read_evaluations_of_no_file_is_none_and_of_another_format_is_refused(tmp_path):
    file = tmp_path / "evaluations.jsonl"
    assert read_evaluations(file) == []
    file.write_text('{"format": 99}\n')
    with pytest.raises(ValueError, match=r"evaluations.jsonl:1: wanted a record of format 1"):
        read_evaluations(file)
    file.write_text("no\n" + json.dumps(record("a", 1)) + "\n")
    with pytest.raises(ValueError, match=r"evaluations.jsonl:1: not JSON"):
        read_evaluations(file)


@pytest.mark.parametrize(("there", "limit", "wanted"), [(10, 3, [0, 4, 9]), (2, 5, [0, 1]), (4, 0, []), (5, 1, [0])])
def test_samples_are_a_bounded_number_spread_over_the_problems(there, limit, wanted):
    got = samples_of(problems(there), groups(range(there)), str, limit=limit)
    assert [shown["problem"] for shown in got] == wanted
    assert [shown["prompt"] for shown in got] == [f"question {n}" for n in wanted]


def test_samples_leave_out_problems_without_a_group_and_cut_what_is_long():
    long = dict(groups([2]), **{})
    rollout = make_rollout(3, reward=0.5)
    long[2] = make_group(make_ticket("t", kind="eval", order=-1), rollouts=(rollout,) * 20)
    (shown,) = samples_of(problems(4), long, lambda tokens: "x" * 100_000, limit=8)
    assert shown["problem"] == 2 and len(shown["responses"]) == eval_summary.MAX_SHOWN_SAMPLES
    assert len(shown["responses"][0]["text"]) < eval_summary.MAX_CHARS + 100 and shown["answer"] == "7"
    json.dumps(shown, allow_nan=False)
