"""reasoning-gym's families, all of them: what is judged here is what the library would judge."""

import decimal
import functools
import json
from typing import Any

import pytest

from actor.rewards import registry, verifier_worker
from actor.rewards.types import Context, Response, Score
from bridge.rollout_types import Task
from configs.sections.prompts import PromptSource
from learner.data.generated import ReasoningGymSource
from learner.data.problem import task_of
from tests.support.lazy import gym, reasoning_gym

DAILY = (
    *("arc_agi", "rearc"),  # grids, of which JSON has made lists
    *("boxnet", "graph_color", "propositional_logic", "rubiks_cube"),  # name no answer
    *("countdown", "power_function", "emoji_mystery"),  # give a little for any text
    *("gsm_symbolic", "list_functions"),  # draw all problems at once
    *(
        "basic_arithmetic",
        "chain_sum",
        "leg_counting",
        "letter_jumble",
        "prime_factorization",
        "sudoku",
        "zebra_puzzles",
    ),
)
"""The families that the code treats apart, and some plain ones."""
TEXTS = ("", "utter nonsense")


@functools.cache
def entries(family: str) -> list[dict[str, Any]]:
    return list(reasoning_gym.create_dataset(family, size=2, seed=3))


def task_of_entry(entry: dict[str, Any]) -> Task:
    return task_of(
        "" if entry["answer"] is None else entry["answer"], {"reasoning_gym": 1.0}, answer_in="box", metadata=entry
    )


def judged(text: str, task: Task) -> Score:
    return gym.score(Response(text=text, finish="stop", num_tokens=1), task, Context())


def scored(text: str, task: Task) -> float:
    return judged(text, task).value


def by_the_library(text: str, entry: dict[str, Any]) -> float | str:
    """What it gives for its own entry; the name of what it raises."""
    try:
        scorer: Any = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return scorer(text, entry)
    except Exception as e:
        return type(e).__name__


@pytest.mark.nightly
def test_reasoning_gym_score_of_every_other_family_is_the_librarys_of_its_own_entry():
    from reasoning_gym.factory import DATASETS

    others = DATASETS.keys() - {"composite", *DAILY}
    assert len(others) == len(DATASETS) - len(DAILY) - 1 > 80
    for family in sorted(others):
        test_reasoning_gym_score_of_a_family_is_the_librarys_of_its_own_entry(family)


@pytest.mark.heavy
@pytest.mark.parametrize("family", DAILY)
def test_reasoning_gym_score_of_a_family_is_the_librarys_of_its_own_entry(family):
    for entry in entries(family):
        own = () if entry["answer"] is None else (str(entry["answer"]),)
        for text in (*TEXTS, *own):
            try:
                got = scored(f" {text}\n", task_of_entry(entry))
            except Exception as e:
                got = type(e).__name__
            assert got == by_the_library(text, entry), (family, text)
            assert got == 1.0 or text not in own, family


def test_reasoning_gym_right_answer_where_the_library_names_none_earns_all():
    entry = entries("graph_color")[0]
    assert entry["answer"] is None
    assert scored(json.dumps(entry["metadata"]["possible_answer"]), task_of_entry(entry)) == 1.0


def test_reasoning_gym_mixture_of_others_is_no_source():
    with pytest.raises(ValueError, match="prompts.task='composite'"):
        ReasoningGymSource(PromptSource(task="composite", verifier="reasoning_gym"), seed=3)


@pytest.mark.parametrize("family", ["gsm_symbolic", "list_functions", pytest.param("acre", marks=pytest.mark.nightly)])
def test_reasoning_gym_family_that_draws_all_at_once_is_a_source_without_an_end(family):
    source, again = (ReasoningGymSource(PromptSource(task=family, verifier="reasoning_gym"), seed=3) for _ in range(2))
    far = len(source) - 1
    assert source[far] == again[far] and source[0] == again[0]
    assert len({source[i * 10_000 + 7].question for i in range(8)}) > 4  # no data set is another's


@pytest.mark.parametrize("family", ["countdown", "power_function", "emoji_mystery"])
def test_reasoning_gym_text_that_earns_a_little_is_wrong_all_the_same(family):
    got = judged("utter nonsense", task_of_entry(entries(family)[0]))
    assert got == Score(value=0.01, verdict="wrong", answer="utter nonsense")
    assert judged(entries(family)[0]["answer"], task_of_entry(entries(family)[0])).verdict == "ok"


@pytest.mark.parametrize("family", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube"])
def test_reasoning_gym_family_without_answers_has_none_and_is_not_judged_by_one(family):
    assert ReasoningGymSource(PromptSource(task=family, verifier="reasoning_gym"), seed=3)[0].task.answer == ""
    with pytest.raises(ValueError, match="names no answers"):
        ReasoningGymSource(PromptSource(task=family, verifier="exact"), seed=3)[0]


def asked(text: str, task: Task) -> Score | str:
    """What a worker says of a text, or what went wrong."""
    response = Response(text=text, finish="stop", num_tokens=1)
    answer = verifier_worker._answer(
        registry.load, verifier_worker.ScoreRequest(verifier="reasoning_gym", task=task, response=response)
    )
    return answer.score or answer.error


def test_text_that_makes_the_librarys_scorer_raise_is_wrong():
    entry = entries("prime_factorization")[0]
    assert by_the_library("2 x 3", entry) == "ValueError"
    # An empty answer: it casts no vote, and the others' votes count.
    assert asked("2 x 3", task_of_entry(entry)) == Score(value=0.0, verdict="wrong", answer="")


def test_scorer_that_raises_on_the_own_answer_too_is_no_verdict():
    entry = entries("prime_factorization")[0]
    assert str(asked("2 x 3", task_of_entry({**entry, "answer": "none of these"}))).startswith("ValueError: invalid")


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("coin_flip", lambda answer: "0"),
        ("complex_arithmetic", lambda answer: "nan"),
        ("game_of_life_halting", lambda answer: str(answer != "True")),
        ("puzzle24", lambda answer: "6 + 6 + 6 + 6"),
    ],
)
def test_reasoning_gym_text_that_the_librarys_scorer_takes_for_every_problem_earns_nothing(family, wrong):
    for entry in entries(family):
        judged_task = task_of_entry(json.loads(json.dumps(entry)))
        assert scored(entry["answer"], judged_task) == 1.0
        assert scored(wrong(entry["answer"]), judged_task) == 0.0


def test_reasoning_gym_tolerance_is_that_of_the_problems_arguments():
    source = PromptSource(
        task="decimal_arithmetic", verifier="reasoning_gym", task_args={"max_num_decimal_places": 10, "precision": 16}
    )
    judged_task = ReasoningGymSource(source, seed=3)[0].task
    off = str(decimal.Decimal(judged_task.answer) + decimal.Decimal("0.0009"))
    assert (scored(judged_task.answer, judged_task), scored(off, judged_task) < 1) == (1.0, True)
