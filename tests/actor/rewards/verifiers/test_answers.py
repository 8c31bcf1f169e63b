"""Which answer a verifier says it read, by which responses vote (maj@k)."""

import json

import pytest

from actor.rewards.registry import gold_response
from actor.rewards.types import Context, Response, Score, answer_key
from actor.rewards.verifiers import math, text_match
from bridge.rollout_types import MAX_ANSWER_CHARS, Finish, Task
from configs.sections import RewardsConfig
from configs.sections.prompts import READS_ANSWERS
from tests.support.lazy import gym, reasoning_gym

NO_CONTEXT = Context()


def read(score, text, answer, finish: Finish = "stop"):
    task = Task.judged_by("any", answer=answer)
    return score(Response(text=text, finish=finish, num_tokens=1), task, NO_CONTEXT).answer


@pytest.mark.parametrize(
    ("texts", "gold"),
    [
        ((r"\boxed{12}", "The answer is 12.", "#### 12", r"\boxed{12.0}", r"\boxed{\frac{24}{2}}"), "7"),
        ((r"\boxed{\frac{1}{3}}", r"\boxed{0.333333}", r"\boxed{1/3}"), "7"),
        ((r"\boxed{x+1}", r"\boxed{1 + x}"), "7"),
        ((r"\boxed{\{1, 2\}}", r"\boxed{\{2,1\}}"), "7"),
        ((r"\boxed{1,000}", r"\boxed{1000}"), "7"),
        ((r"\boxed{\sqrt{3+2\sqrt{2}}-1-\sqrt{2}}", r"\boxed{0}"), "7"),
        ((r"\boxed{5\text{ cm}}", r"\boxed{50\text{ mm}}", r"\boxed{5}"), r"7\text{ cm}"),
        (("The answer is (B)", r"\boxed{\text{B}}"), "C"),
        # Equal to the row's own answer, by whatever rule the verifier has: one vote.
        ((r"\boxed{50\%}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}"), "1/2"),
        ((r"\boxed{x(x+1)}", r"\boxed{x^2+x}"), "x^2 + x"),
    ],
)
def test_math_answers_that_are_equal_read_alike(texts, gold):
    assert len({read(math.score, text, gold) for text in texts}) == 1 and read(math.score, texts[0], gold)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\boxed{12}", r"\boxed{13}"),
        (r"\boxed{1234567}", r"\boxed{1234568}"),  # beyond six digits, but whole
        (r"\boxed{0.33}", r"\boxed{0.333333}"),
        (r"\boxed{-3}", r"\boxed{3}"),
        (r"\boxed{x+1}", r"\boxed{x-1}"),
        (r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
        (r"\boxed{9^{9^9}}", r"\boxed{9^{9^8}}"),  # too large to compute
        (r"\boxed{10^{-10}}", r"\boxed{2 \cdot 10^{-10}}"),
        (r"\boxed{10^{-10}}", r"\boxed{0}"),
        (r"\boxed{5\text{ cm}}", r"\boxed{5\text{ m}}"),
        (r"\boxed{5\text{ cm}}", r"\boxed{5\text{ kg}}"),
        ("The answer is (A)", "The answer is (B)"),
    ],
)
def test_math_answers_that_differ_read_differently(one, other):
    gold = "C" if "(A)" in one else r"7\text{ cm}" if "cm" in one else "7"
    assert read(math.score, one, gold) != read(math.score, other, gold)


@pytest.mark.parametrize("text", ["I think 3 and then 4", "", r"\boxed{}", r"\boxed{3"])
def test_math_response_that_states_none_has_an_empty_answer(text):
    assert read(math.score, text, "7") == ""


def test_math_answer_anywhere_in_the_text_is_read_where_it_is_looked_for():
    task = Task.judged_by("math", answer="7", metadata=json.dumps({"answer_in": "text"}))

    def found(text):
        return math.score(Response(text=text, finish="stop", num_tokens=1), task, NO_CONTEXT)

    assert found("so it is 7").answer == "7" and found("so it is 8").answer == "8" and found("hm").answer == ""


def test_exact_answer_is_the_normalised_text():
    assert (
        read(text_match.score_exact, "  The  Answer\n", "x")
        == read(text_match.score_exact, "the answer", "x")
        == "the answer"
    )
    assert read(text_match.score_exact, " ", "x") == ""


@pytest.mark.heavy
def test_reasoning_gym_answer_is_the_text():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    task = Task.judged_by("reasoning_gym", answer=entry["answer"], metadata=json.dumps(entry, default=str))
    for text in (entry["answer"], f" {entry['answer']}\n", "5  or 6"):
        got = gym.score(Response(text=text, finish="stop", num_tokens=1), task, NO_CONTEXT)
        assert got.answer == " ".join(text.split())


def test_verifiers_that_read_answers_are_those_that_the_config_knows():
    assert {"exact": text_match, "math": math, "reasoning_gym": gym}.keys() == set(READS_ANSWERS)


def test_verifier_without_answers_says_none():
    context = Context(settings=RewardsConfig(format_pattern="a"))
    returned = text_match.score_format(
        Response(text="a", finish="stop", num_tokens=1), Task.judged_by("format", answer=""), context
    )
    assert Score.of(returned).answer is None


def test_long_answers_stay_apart_within_the_bound():
    first, second = answer_key("x" * 500 + "1"), answer_key("x" * 500 + "2")
    assert first != second and len(first) == len(second) == MAX_ANSWER_CHARS and first.startswith("xxx")
    assert answer_key(" a \n b ") == "a b"


@pytest.mark.parametrize("answer_in", ["conclusion", "text", "number"])
@pytest.mark.parametrize(
    "answer", ["72", "$72$", r"\boxed{72}", "48 + 24 = <<48+24=72>>72 clips.\n#### 72", "So <answer>72</answer>"]
)
def test_reference_answer_is_right_as_an_answer_or_as_a_worked_solution(answer, answer_in):
    task = Task.judged_by("math", answer=answer, metadata=json.dumps({"answer_in": answer_in}))
    text = gold_response("math", task, RewardsConfig())
    got = math.score(Response(text=text, finish="stop", num_tokens=1), task, Context(settings=RewardsConfig()))
    assert got.value == 1


@pytest.mark.parametrize(("text", "value"), [("4 - 4 = 0", 1.0), ("The answer is 4 - 4.", 1.0), ("4 - 3 = 0", 0.0)])
def test_calculation_whose_value_is_zero_is_computed(text, value):
    task = Task.judged_by("math", answer="0")
    got = math.score(Response(text=text, finish="stop", num_tokens=1), task, Context(settings=RewardsConfig()))
    assert got.value == value
