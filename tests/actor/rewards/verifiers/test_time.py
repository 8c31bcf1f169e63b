"""The text verifiers on odd and long texts: what bounds their work, by counts and by the limit itself."""

import json

import pytest

from actor.rewards.types import Context, Response
from actor.rewards.verifiers import cpu_time, math, math_expression, math_normalize, text_match
from actor.rewards.verifiers.math_extract import extract_answer
from bridge.rollout_types import Task
from configs.sections import RewardsConfig


def judged(text, gold="5", answer_in="conclusion"):
    task = Task.judged_by("math", answer=gold, metadata=json.dumps({"answer_in": answer_in}))
    return math.score(Response(text=text, finish="stop", num_tokens=1), task, Context()).value


@pytest.mark.parametrize("space", [" ", "\t", "\u00a0", "\u3000", " \t", "\r", "\x0b"])
@pytest.mark.parametrize("count", [1, 100_000])
def test_run_of_white_space_counts_once(space, count):
    run = space * count
    assert extract_answer(f"We add. The answer is 5{run}apples") == "5"
    assert extract_answer(f"We add. The answer is{run}5") == extract_answer(f"\\boxed{{{run}5{run}}}") == "5"
    assert judged(f"The answer is 5{run}apples") == judged(f"\\boxed{{5{run}\\text{{apples}}}}") == 1.0


@pytest.mark.parametrize(
    "unit", ["{", "\\boxed{", "<answer>", "\\", "$", "the answer is ", "\\boxed{6} and ", "(", "7,"]
)
@pytest.mark.parametrize("answer_in", ["conclusion", "number"])
def test_long_run_before_a_right_answer_does_not_keep_it_from_being_read(unit, answer_in):
    assert judged(unit * (100_000 // len(unit)) + "\n\n\\boxed{5}", answer_in=answer_in) == (
        0.0 if "and" in unit else 1.0
    )


@pytest.mark.parametrize(
    "text", ["7" * 50_000, "+1" * 30_000, "{" * 50_000, "word " * 9_000, "1," * 40_000, "\\frac" * 9_000]
)
def test_answer_longer_than_answers_are_reaches_no_rule_and_no_parser(text, monkeypatch):
    monkeypatch.setattr(
        math_normalize, "normalize_latex", lambda text, **_: text if text == "5" else pytest.fail("was read")
    )
    monkeypatch.setattr(math, "are_equal", lambda *_: pytest.fail("was compared"))
    math._gold.cache_clear()
    assert judged(f"\\boxed{{{text}}}") == 0.0
    math._gold.cache_clear()


def test_computation_that_never_ends_is_wrong_and_the_next_one_is_judged(monkeypatch):
    def forever(gold, stated):
        while stated == "7":
            try:
                [n**2 for n in range(1000)]
            except Exception:  # as the algebra system does
                continue
        return gold == stated

    monkeypatch.setattr(math, "are_equal", forever)
    monkeypatch.setattr(math, "MAX_CPU_S", 0.05)
    assert [judged(rf"\boxed{{{n}}}") for n in (7, 5, 7, 6)] == [0.0, 1.0, 0.0, 0.0]


def test_limit_within_a_limit_is_the_outer_one():
    def inner():
        return cpu_time.limited(lambda: [None for _ in iter(int, 1)], limit_s=1e9, otherwise="inner")

    assert cpu_time.limited(inner, limit_s=0.05, otherwise="outer") == "outer"
    assert cpu_time.limited(lambda: 3, limit_s=1.0, otherwise=0) == 3


def test_pattern_that_backtracks_for_ever_does_not_match(monkeypatch):
    monkeypatch.setattr(text_match, "MAX_CPU_S", 0.05)
    context = Context(settings=RewardsConfig(format_pattern="(a+)+b"))
    task = Task.judged_by("format", answer="")
    got = [
        text_match.score_format(Response(text=t, finish="stop", num_tokens=1), task, context) for t in ("a" * 60, "aab")
    ]
    assert got == [0.0, 1.0]


def test_open_tags_of_a_reasoning_gym_response_are_not_handed_to_the_library(monkeypatch):
    import reasoning_gym

    from actor.rewards.verifiers import reasoning_gym as gym

    seen = []
    monkeypatch.setattr(gym, "extract_answer", lambda text: seen.append(text))
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    task = Task.judged_by("reasoning_gym", answer=entry["answer"], metadata=json.dumps(entry, default=str))
    for text in ("<answer>" * 9_000, "<answer>5</answer>" + "<answer>" * 9_000):
        gym.score(Response(text=text, finish="stop", num_tokens=1), task, Context())
    assert seen == ["<answer>5</answer>"]


@pytest.mark.parametrize(
    "text", [r"5 \mod 6", r"5 \mod 0", r"\frac{1}{0} \mod 2", r"x \mod y", r"\|x\|", "1/0", r"0^{-1}", "[5", "!5"]
)
@pytest.mark.parametrize("answer_in", ["conclusion", "text"])
def test_no_expression_makes_the_verifier_fail(text, answer_in):
    assert judged(rf"\boxed{{{text}}}", answer_in=answer_in) == (1.0 if text == r"5 \mod 6" else 0.0)
    assert judged(rf"so it is ${text}$", gold="4", answer_in=answer_in) == 0.0
    assert judged(rf"\boxed{{{text}}}", gold=text, answer_in=answer_in) == 1.0


@pytest.mark.parametrize("length", [90, 1_900])
@pytest.mark.parametrize("unit", ["1/2", "/2", r"\frac{1}{2}"])
def test_chain_of_divisions_is_not_computed(unit, length, monkeypatch):
    monkeypatch.setattr(math_expression, "latex2sympy", lambda *_, **__: pytest.fail("was read"))
    chain = "1" + unit * 25 * (length // 90)
    assert not math.are_equal("8128", chain)


def test_failure_of_the_algebra_system_is_no_equality(monkeypatch):
    def fails(*_, **__):
        raise RecursionError

    monkeypatch.setattr(math_expression, "_parsed", fails)
    math_expression.read.cache_clear()
    assert judged(r"\boxed{8127 + 2}", gold="8129") == 0.0
    math_expression.read.cache_clear()


def test_what_is_read_is_read_whole():
    for text in (
        r"\text{undefined } 3",
        "3'",
        "5 6",
        "1010_2",
        r"3 \star 2",
        r"1, 2, \dots, n",
        "3 is wrong",
        "10!!",
        "3?",
    ):
        assert math_expression.read(text) is None
