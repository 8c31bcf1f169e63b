import json

import numpy as np
import pytest

from bridge.rollout_types import Task
from learner.data.problem import Problem
from learner.evaluation import eval_summary
from learner.evaluation.eval_summary import samples_of
from tests.bridge.factories import make_group, make_rollout, make_ticket


def problems(count):
    task = Task.judged_by("exact", answer="7")
    return {n: Problem(f"question {n}", np.array([n], np.int32), task) for n in range(count)}


def groups(numbers, k=1):
    return {n: make_group(make_ticket("t", kind="eval", num_samples=k, order=-1)) for n in numbers}


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
