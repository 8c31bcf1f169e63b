import random

import pytest

from actor.environments.builtin.toy import Calculator
from configs.tasks import calculator

ROW = {"answer": "888", "parser": "tag", "tool": "c", "call_reward": 0.25, "style": "words"}


def play(*actions: str, **changes):
    game = Calculator()
    assert game.reset(ROW | changes) == []
    return [game.step(a) for a in actions]


def said(step) -> str:
    return step.messages[0]["content"]


def test_call_is_worked_out_and_the_answer_ends_the_episode():
    called, answered = play("<c>37*24</c>", "888")
    assert said(called) == "888" and not called.done
    assert (answered.reward, answered.done) == (1.0, True)


@pytest.mark.parametrize("parser", calculator.PARSERS)
def test_call_in_each_parsers_form_is_worked_out(parser):
    (step,) = play(calculator.call(parser, "c", "37*24"), parser=parser)
    assert said(step) == "888"


def test_first_good_call_alone_earns_its_reward():
    rewards = [s.reward for s in play("<c>1/0</c>", "<c>1+1</c>", "<c>1+2</c>", "887")]
    assert rewards == [0.0, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("text", ["888", " 888. ", "Answer: 888", "the answer is 888"])
def test_answer_is_all_of_a_turn(text):
    (step,) = play(text)
    assert step.done and step.reward == float(text != "the answer is 888")


@pytest.mark.parametrize("text", ["887", "", "888 or 889", "8888", "I think 888", "-888"])
def test_answer_that_is_wrong_earns_nothing(text):
    (step,) = play(text)
    assert (step.reward, step.done) == (0.0, True)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("<c>1/0</c>", "Error: division by zero"),
        ("<c>open('/etc/passwd')</c>", "Error: only numbers"),
        ("<c>1+2", "Error: a call that begins with <c>"),
        ("<c>1+2</c><c>9**9**9</c>", "3\nError: exponent too large"),
    ],
)
def test_call_that_is_wrong_is_told_so_and_goes_on(action, told):
    (step,) = play(action)
    assert said(step).startswith(told) and not step.done and step.reward == 0.0


@pytest.mark.parametrize("parser", calculator.PARSERS)
@pytest.mark.parametrize("style", ["words", "short"])
def test_example_of_every_row_is_rewarded(parser, style):
    rows = calculator.rows(1, {"parser": parser, "style": style, "tool": "c"})
    for i in range(50):
        row = rows(i)
        game = Calculator()
        game.reset(dict(row.metadata) | {"answer": row.answer})
        example = calculator.example(row, random.Random(0))
        first, last = (game.step(e.text) for e in example if e.by_policy)
        assert said(first) == example[1].text
        assert (last.reward, last.done) == (1.0, True)
