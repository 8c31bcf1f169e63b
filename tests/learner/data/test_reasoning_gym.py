import json
from typing import Any

import pytest

from configs.sections.prompts import PromptSource
from learner.data.generated import NUM_PROCEDURAL, ReasoningGymSource
from tests.learner.data.rooms import SUMS


def source_of(**fields):
    given: dict[str, Any] = {"task": "chain_sum", "verifier": "exact", "answer_in": "conclusion"} | fields
    return PromptSource(**given)


SUM_SOURCE = source_of(**SUMS)


def test_reasoning_gym_source_problem_is_a_function_of_seed_and_index():
    a, b = ReasoningGymSource(SUM_SOURCE, seed=5), ReasoningGymSource(SUM_SOURCE, seed=5)
    for index in (0, 3, NUM_PROCEDURAL - 1):
        assert a[index] == b[index]
    assert a[0] != ReasoningGymSource(SUM_SOURCE, seed=6)[0]


def test_reasoning_gym_source_shows_the_patterns_group_and_keeps_the_answer():
    raw = ReasoningGymSource(SUM_SOURCE, seed=0)[7]
    sign = 1 if "+" in raw.question else -1
    left, right = (int(x) for x in raw.question.rstrip(" =").replace("-", "+").split("+"))
    assert int(raw.task.answer) == left + sign * right
    assert raw.question in json.loads(raw.task.metadata)["question"] and raw.question.endswith("=")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(task="nosuch"), "prompts.mixture.a.task='nosuch'"),
        (dict(task_args={"min_terms": 0}), "min_terms must be positive"),
        (dict(task_args={"colour": "red"}), "colour"),
        (dict(task_args={"seed": 3}), "seed"),
    ],
)
def test_reasoning_gym_source_unknown_task_or_arguments_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        ReasoningGymSource(source_of(**fields), seed=0, where="prompts.mixture.a")


def test_reasoning_gym_source_pattern_not_found_is_an_error():
    with pytest.raises(ValueError, match="is not in"):
        _ = ReasoningGymSource(source_of(pattern="(zebra)"), seed=0)[0]
