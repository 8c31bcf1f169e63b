import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from actor.rewards import registry
from actor.rewards.types import Context, Response, Score
from actor.rewards.verifiers import math, text_match
from bridge.rollout_types import MAX_ANSWER_CHARS, Finish, RewardScore, Task
from configs.sections import RewardsConfig
from configs.sections.prompts import VERIFIERS
from tests.support.lazy import gym, reasoning_gym

NO_CONTEXT = Context()


def score(verifier: Callable[[Response, Task, Context], Any], text: str, of: Task, finish: Finish) -> float:
    got = verifier(Response(text=text, finish=finish, num_tokens=1), of, NO_CONTEXT)
    return got.value if isinstance(got, Score) else got


def task(answer: str, verifier: str = "exact", metadata: str = "{}") -> Task:
    return Task.judged_by(verifier, answer=answer, metadata=metadata)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("  42\n", "42", 1.0),
        ("The  Answer", "the answer", 1.0),
        ("\uff14\uff12", "42", 1.0),  # full-width digits
        ("42.", "42", 0.0),
        ("", "42", 0.0),
        ("142", "42", 0.0),
    ],
)
def test_exact_score(response, answer, reward):
    assert score(text_match.score_exact, response, task(answer), "stop") == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("the answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("so it is 42", "42", 0.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        (r"So it is \boxed{43}. Wait: \boxed{42}", "42", 1.0),
        (r"So it is \boxed{42}. Wait: \boxed{43}", "42", 0.0),
        (r"So it is \boxed{42}. But wait, let me see: 43", "42", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("The answer is $1$ or $2$.", "1", 0.0),  # no betting
        ("The answer is $1$ or $2$.", r"\{1, 2\}", 1.0),
        ("1/3", "\\frac13", 1.0),
        ("I don't know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math_score(response, answer, reward):
    assert score(math.score, response, task(answer), "stop") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [("so it is 42", 1.0), ("so it is 43", 0.0), (r"\boxed{43}, though 42", 0.0), ("the answer is 43, not 42", 0.0)],
)
def test_math_score_in_the_whole_text_takes_its_last_number_unless_it_concludes(response, reward):
    anywhere = task("42", "math", json.dumps({"answer_in": "text"}))
    assert score(math.score, response, anywhere, "stop") == reward


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("71", "23 + 48", 0.0),
        ("71", "23 + 48 = (23 + 48)", 0.0),
        ("71", "The answer is 23 + 48.", 0.0),
        ("71", "71 - 0", 0.0),
        ("71", r"\boxed{71 \cdot 1}", 0.0),
        ("71", r"\boxed{\left(23\right) + \left(48\right)}", 0.0),
        ("3", "6/2", 0.0),
        ("He adds 23 + 48.\n#### 71", "23 + 48", 0.0),
        ("71", "23 + 48 = 71", 1.0),
        ("71", "23 + 48 = 61", 0.0),
        ("71", "71.", 1.0),
        ("-5", "-5", 1.0),
        ("-5", "3 - 8 = -5", 1.0),
        ("0.5", "1/2", 1.0),
        ("120000", r"1.2 \times 10^5", 1.0),
        (r"120000", r"\boxed{1.2 \cdot 10^{5}}", 1.0),
        ("1024", "2^{10}", 0.0),
        ("48", r"\sqrt{2304}", 0.0),
        ("71", r"\boxed{23+\,48}", 0.0),
        ("71", r"23+\frac{48}{1}", 0.0),
        ("71", r"\boxed{23+\sqrt{2304}}", 0.0),
        ("71", "The answer is |23|+|48|", 0.0),
        ("71", r"\boxed{\frac{142}{2}}", 0.0),
        ("71", r"\boxed{\sum_{k=0}^{1}(23+25k)}", 0.0),
        ("120", "5!", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("0.5", r"\dfrac12", 1.0),
        ("1.5", "1 1/2", 1.0),
        ("71", r"\boxed{71\text{ apples}}", 1.0),
        ("71", "The answer is 71 apples.", 1.0),
        ("71", r"\$71.00", 1.0),
        ("12", r"12\%", 1.0),
        ("12", "x = 12", 1.0),
        ("12", "(12)", 1.0),
        ("12000", r"\boxed{12{,}000}", 1.0),
        ("1,200", "1200", 1.0),
        ("42", r"\boxed{42 \text{ km/h}}", 1.0),
        ("42", r"\boxed{42\,\text{m}^3}", 1.0),
        ("42", r"\boxed{42^\circ}", 1.0),
        ("42", r"\boxed{€42}", 1.0),
        ("42", r"\boxed{42\text{ children's books}}", 1.0),
        ("42", r"\boxed{42\text{ T-shirts}}", 1.0),
        ("42", r"\boxed{20 + 22 \text{ km/h}}", 0.0),
        ("x + 1", "1 + x", 1.0),
        (r"\frac{1}{2} + \sqrt{2}", r"\sqrt{2} + \frac{1}{2}", 1.0),
    ],
)
def test_math_of_a_number_wants_it_worked_out(answer, response, reward):
    wants_number = task(answer, "math", json.dumps({"answer_in": "number"}))
    assert score(math.score, response, wants_number, "stop") == reward


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("8", "9 minus 1 = 8", 1.0),
        ("8", "Ann has 17 apples and gives 9 away, so she has 8 left.", 1.0),
        ("8", "Eight of 17 apples", 0.0),
        ("71", "The sum of 23 and 48", 0.0),
        ("71", "It is 70, 71 or 72", 0.0),
        ("71", "So 71 it is. But the answer is 72", 0.0),
        ("-5", "That makes -5 apples", 1.0),
        ("5", "Nine apples less 4 are 9 -4 = 5", 1.0),
        ("-4", "What is left of 9 -4", 0.0),
        ("4", "What is left of (9) - 4", 1.0),
        ("1200", "Altogether 1,200 apples", 1.0),
        ("2.5", "Ann has 2.5 apples.", 1.0),
        ("x + 1", "so it must be x + 1", 0.0),
        ("71", "no number at all", 0.0),
    ],
)
def test_math_of_a_number_takes_the_last_one_of_a_response_that_concludes_nothing(answer, response, reward):
    wants_number = task(answer, "math", json.dumps({"answer_in": "number"}))
    assert score(math.score, response, wants_number, "stop") == reward
    assert score(math.score, response, task(answer, "math", json.dumps({"answer_in": "conclusion"})), "stop") == 0.0


def test_math_of_a_number_reads_whole_sentences_of_a_response_that_was_cut_off():
    wants_number = task("8", "math", json.dumps({"answer_in": "number"}))
    assert score(math.score, "Ann has 8 apples. Bob has 1", wants_number, "length") == 1.0
    assert score(math.score, "Ann has 8", wants_number, "length") == 0.0


@pytest.mark.parametrize("where", ["conclusion", "text"])
def test_math_of_an_expression_takes_one_that_is_left_to_be_worked_out(where):
    """What any equal expression earns, and why a task whose question is its answer wants `number`."""
    assert score(math.score, "23 + 48", task("71", "math", json.dumps({"answer_in": where})), "stop") == 1.0


@pytest.mark.parametrize(
    "statement",
    ["42 (apples)", "42 [units]", "42 - as computed", "42 – as computed", r"\$42/hour", "$42/hour", "`42`", '"42"'],
)
def test_math_reads_a_statement_without_the_mark_before_its_words(statement):
    assert score(math.score, f"The answer is {statement}.", task("42", "math"), "stop") == 1.0


@pytest.mark.parametrize(
    ("answer", "stated", "reward"),
    [
        ("1<x<2", "1, 2", 0.0),
        ("1<x<2", r"x=1 \text{ or } x=2", 0.0),
        ("(-3,3)", r"x=-3 \text{ or } x=3", 0.0),
        (r"x\in(1,2)", r"\{1,2\}", 0.0),
        (r"x=1 \text{ or } x=2", "(1,2)", 0.0),
        ("-3,3", "|x|<3", 0.0),
        ("1<x<2", "(1,2)", 1.0),
        ("(1,2)", "1<x<2", 1.0),
        ("(1, 2)", "x=1, y=2", 1.0),
    ],
)
def test_math_tells_an_open_interval_from_its_ends(answer, stated, reward):
    assert score(math.score, rf"\boxed{{{stated}}}", task(answer, "math"), "stop") == reward


@pytest.mark.parametrize(
    ("answer", "stated", "reward"),
    [
        (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5", 1.0),
        (r"\{1\pm\sqrt{5},-2\}", r"-2, 1\pm\sqrt5", 1.0),
        ("1,-1,2,-2", r"\pm 1, \pm 2", 1.0),
        (r"0, \pm 1", "-1,0,1", 1.0),
        ("1+2i, 1-2i, -3", r"-3, 1\pm2i", 1.0),
        (r"\pm 1, 2", "1, 2", 0.0),
        (r"x=\pm 2, y=3", "3", 0.0),
    ],
)
def test_math_reads_both_signs_of_each_part_of_a_list(answer, stated, reward):
    assert score(math.score, rf"\boxed{{{stated}}}", task(answer, "math"), "stop") == reward


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        ("42", r"\text{Area} = 42"),
        ("42", r"S_{\text{total}} = 42"),
        ("42", "[ABC] = 42"),
        ("42", "m + n = 42"),
        ("x=2, y=1", "(2, 1)"),
        ("42", r"42\text{ N}"),
        (r"12\frac12\%", r"12.5\%"),
        (r"\frac{1}{3}", r"P(X=1) = \frac13"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\mathbf{M} = \begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"A^{-1} = \begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ],
)
def test_math_reads_the_value_of_a_name_of_several_signs_a_point_and_a_unit(answer, stated):
    assert score(math.score, rf"\boxed{{{stated}}}", task(answer, "math"), "stop") == 1.0


@pytest.mark.parametrize(("answer", "stated"), [("x=2, y=1", "(1, 2)"), ("x+y=5", "5"), ("42", "42N"), ("5", "5n")])
def test_math_takes_no_point_of_another_order_no_side_of_a_line_and_no_product(answer, stated):
    assert score(math.score, rf"\boxed{{{stated}}}", task(answer, "math"), "stop") == 0.0


def test_reasoning_gym_reads_the_last_answer_though_the_tag_is_named_before():
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=5)[0]
    judged = task(entry["answer"], "reasoning_gym", json.dumps(entry, default=str))
    said = f"I will write it in <answer> tags. <answer>{entry['answer']}</answer>"
    assert score(gym.score, said, judged, "stop") == 1.0


def test_math_on_an_answer_that_is_no_expression_fails_rather_than_scores():
    with pytest.raises(ValueError, match="expected a mathematical expression"):
        score(math.score, "7", task(""), "stop")


@pytest.mark.parametrize("family", ["chain_sum", "leg_counting", "gcd"])
def test_reasoning_gym_score_agrees_with_the_library(family):
    dataset = reasoning_gym.create_dataset(family, size=3, seed=5)
    for entry in dataset:
        judged = task(entry["answer"], "reasoning_gym", json.dumps(entry, default=str))
        assert score(gym.score, f" {entry['answer']}\n", judged, "stop") == 1.0
        assert score(gym.score, "nonsense", judged, "length") == dataset.score_answer("nonsense", entry)


@pytest.mark.parametrize(
    ("response", "judged"),
    [
        ("<think>3 + 4 is 8, no</think> <answer>{}</answer>", "{}"),
        ("<answer>999</answer>, rather <answer> {} </answer> as said", "{}"),
        ("<answer>{}</answer>, rather <answer>999</answer>", "999"),
        ("it is <answer>{}", "it is <answer>{}"),
    ],
)
def test_reasoning_gym_judges_the_last_answer_of_a_response_that_marks_one(response, judged):
    dataset = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)
    entry = dataset[0]
    wanted = dataset.score_answer(judged.format(entry["answer"]), entry)
    asked = task(entry["answer"], "reasoning_gym", json.dumps(entry, default=str))
    assert (
        score(gym.score, response.format(entry["answer"]), asked, "stop")
        == wanted
        == (1.0 if judged == "{}" else wanted)
    )


def test_reasoning_gym_without_an_entry_fails_rather_than_scores():
    with pytest.raises(ValueError, match="source_dataset"):
        score(gym.score, "7", task("7", "reasoning_gym"), "stop")


def states_much(response_text: str, task: Task) -> Score:
    return Score(value=float(response_text), verdict="ok", answer="x" * 299 + task.answer)


def test_registry_makes_the_score_of_a_custom_verifier_one_that_a_rollout_holds():
    verifier = registry.load(f"{__name__}:states_much")
    got = verifier(Response(text="1", finish="stop", num_tokens=1), task("7"), NO_CONTEXT)
    held = RewardScore(name="mine", value=got.value, verdict=got.verdict, answer=got.answer)
    assert held.answer is not None and held.answer.startswith("xxx") and len(held.answer) == MAX_ANSWER_CHARS
    with pytest.raises(ValueError, match="must return a finite number"):
        verifier(Response(text="nan", finish="stop", num_tokens=1), task("7"), NO_CONTEXT)


def test_registry_of_every_name_gives_a_verifier():
    response = Response(text="7", finish="stop", num_tokens=1)
    got = {name: registry.load(name)(response, task("7"), NO_CONTEXT) for name in ("exact", "math")}
    assert got == dict.fromkeys(("exact", "math"), Score(value=1.0, verdict="ok", answer="7"))
    assert registry.load("exact")(response, task("8"), NO_CONTEXT) == Score(value=0.0, verdict="wrong", answer="7")
    with pytest.raises(ValueError, match="expected one of code, exact, format, math, reasoning_gym"):
        registry.load("nope")
    assert {*registry.MODULES, "judge"} == set(VERIFIERS)  # a judge is asked elsewhere


def test_registry_loads_ones_own_by_module_and_function():
    four = Response(text="four", finish="length", num_tokens=3)
    for name, value in {"length": 4, "ending": 6, "tokens": 3}.items():
        got = registry.load(f"{__name__}:{name}")(four, task("7"), NO_CONTEXT)
        assert got == Score(value=value, verdict="ok")
    seven = Response(text="so</think>seven", finish="stop", num_tokens=3)
    for name, value in {"length": 5, "thinks": 5.2, "whole": len("<think>so</think>seven")}.items():
        assert registry.load(f"{__name__}:{name}")(seven, task("7"), NO_CONTEXT).value == value
    constants = "finish, num_tokens, thinking, message"
    said = rf"expected a function \(response_text, task, \*, any of {constants}\) -> float, got \(answer: str"
    with pytest.raises(ValueError, match=said):
        registry.load(f"{__name__}:task_of_three")


def length(response_text: str, task: Task) -> float:
    return len(response_text)


def ending(response_text: str, task: Task, finish: Finish) -> float:
    return len(finish)


def tokens(response_text: str, task: Task, *, num_tokens: int) -> float:
    return num_tokens


def thinks(message: str, task: Task, *, thinking: str) -> float:
    """Takes the answer by position, whatever its name is."""
    return len(message) + len(thinking) / 10


def whole(response_text: str, task: Task, message: str) -> float:
    return len(message)


def task_of_three(answer: str, verifier: str, metadata: str) -> None: ...


@pytest.mark.parametrize(
    ("returned", "want"), [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (-2.5, -2.5), (Decimal("0.5"), 0.5)]
)
def test_score_of_a_number_is_its_float(returned, want):
    got = Score.of(returned)
    assert got.value == want and type(got.value) is float and got.verdict == ("ok" if want > 0 else "wrong")


@pytest.mark.parametrize(
    "returned", [None, "1", float("nan"), float("-inf"), [1.0], np.ones(1), 1j, 10**400, Decimal("NaN")]
)
def test_score_that_is_no_finite_number_is_refused(returned):
    with pytest.raises(ValueError, match="a verifier must return a finite number, got"):
        Score.of(returned)


@pytest.mark.parametrize(
    ("text", "wanted", "own", "value"),
    [
        ("<think>a\nb</think> 7\n", r"<think>.*</think> \d+", "", 1.0),
        ("7", r"<think>.*</think> \d+", "", 0.0),
        ("7", "nothing like it", r"\d", 1.0),
        ("77", "", r"\d", 0.0),
    ],
)
def test_format_wants_the_whole_response_to_match_the_rows_pattern_or_the_configs(text, wanted, own, value):
    context = Context(settings=RewardsConfig(format_pattern=wanted))
    of = task("7", "format", json.dumps({"format": own} if own else {}))
    assert text_match.score_format(Response(text=text, finish="stop", num_tokens=1), of, context) == value


@pytest.mark.parametrize(("own", "said"), [("", "requires rewards.format_pattern"), ("(", "not a regular expression")])
def test_format_without_a_pattern_fails_rather_than_scores(own, said):
    with pytest.raises(ValueError, match=said):
        score(text_match.score_format, "7", task("7", "format", json.dumps({"format": own})), "stop")
