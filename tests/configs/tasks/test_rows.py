import json
import random
import subprocess
import sys

import pytest

from configs.tasks import calculator, catalog, guess, rows, textarena

MAKERS = {
    "guess": (guess.rows, {"style": "short"}),
    "calculator": (calculator.rows, {"style": "short", "tool": "c"}),
    "textarena": (textarena.rows, {"games": "GuessTheNumber-v0, TicTacToe-v0"}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_row_is_a_function_of_seed_and_index(name):
    rows, args = MAKERS[name]
    first = [rows(3, args)(i) for i in range(50)]
    again = [rows(3, args)(i) for i in reversed(range(50))][::-1]
    assert first == again
    assert first != [rows(4, args)(i) for i in range(50)]
    assert len({r.question for r in first}) > 30
    for one in first:
        assert json.loads(json.dumps(dict(one.metadata))) == one.metadata


def test_rows_are_the_same_in_another_process():
    code = "from configs.tasks import guess; print([guess.rows(1, {})(i).answer for i in range(20)])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str([guess.rows(1, {})(i).answer for i in range(20)])


def test_guess_rows_hold_the_secret_and_enough_guesses():
    for i in range(200):
        one = guess.rows(0, {"max_value": 20, "min_size": 2, "max_size": 9})(i)
        low, high = one.metadata["low"], one.metadata["high"]
        assert 0 <= low <= int(one.answer) <= high <= 20 and 2 <= high - low + 1 <= 9
        assert f"from {low} to {high}" in one.question
        assert 2 ** one.metadata["max_guesses"] > high - low + 1  # halving finds it


def test_calculator_answers_are_pythons():
    for i in range(100):
        one = calculator.rows(0, {"num_terms": 4})(i)
        assert int(one.answer) == eval(one.metadata["expression"])
        assert one.metadata["expression"] in one.question


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_example_alternates_and_begins_with_the_policy(name):
    module = {"guess": guess, "calculator": calculator}[name]
    for i in range(50):
        said = module.example(MAKERS[name][0](0, MAKERS[name][1])(i), random.Random(i))
        assert [s.by_policy for s in said] == [k % 2 == 0 for k in range(len(said))]


@pytest.mark.parametrize(
    ("make", "args", "said"),
    [
        (guess.rows, {"size": 3}, "no argument 'size'; expected one of max_value, min_size"),
        (guess.rows, {"max_value": "3"}, "max_value must be int, got '3'"),
        (guess.rows, {"max_value": True}, "max_value must be int, got True"),
        (guess.rows, {"min_size": 9, "max_size": 8}, "min_size <= max_size"),
        (guess.rows, {"style": "long"}, "style words or short"),
        (calculator.rows, {"operators": "+/"}, "operators from"),
        (calculator.rows, {"parser": "xml"}, "parser hermes, llama3, tag"),
        (calculator.rows, {"tool": "a b"}, "identifier as tool"),
        (calculator.rows, {"num_terms": 0}, "num_terms >= 1"),
        (textarena.rows, {"games": "Nothing-v0"}, "has no game 'Nothing-v0'"),
        (textarena.rows, {"games": "Wordle-v0"}, "Wordle-v0 cannot be played: LookupError"),
        (textarena.rows, {"seat": 1}, "seat: expected"),
    ],
)
def test_rows_of_arguments_that_are_none_are_refused(make, args, said):
    with pytest.raises(ValueError, match=said):
        make(0, args)


def test_read_args_takes_whole_numbers_for_real_ones():
    assert rows.read_args(guess.GuessArgs, "guess", {"possible_reward": 1}).possible_reward == 1


def test_environments_with_example_episodes_have_rows():
    assert catalog.EXAMPLES.keys() < catalog.ROWS.keys()
