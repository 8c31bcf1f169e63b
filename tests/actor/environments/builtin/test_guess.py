import pytest

from actor.environments.builtin.toy import Guess
from configs.tasks import guess

ROW = {"answer": "42", "low": 40, "high": 49, "max_guesses": 3, "possible_reward": 0.25, "style": "words"}


def play(*actions: str, **changes):
    game = Guess()
    assert game.reset(ROW | changes) == []
    return [game.step(a) for a in actions]


def test_guess_that_is_right_earns_one_and_ends():
    (only,) = play(" 42.\n")
    assert (only.reward, only.done) == (1.0, True)


def test_guess_that_is_wrong_hears_the_direction():
    first, second = play("45", "41")
    assert "lower" in first.messages[0]["content"] and "higher" in second.messages[0]["content"]
    assert not first.done and not second.done
    assert [s.messages[0]["content"] for s in play("45", "41", style="short")] == ["<:", ">:"]


def test_guess_that_was_ruled_out_earns_nothing():
    assert [s.reward for s in play("45", "46", "41")] == [0.25, 0.0, 0.25]
    assert play("50")[0].reward == 0.0  # outside from the start


def test_last_guess_ends_the_game():
    assert [s.done for s in play("40", "41", "43")] == [False, False, True]


@pytest.mark.parametrize("text", ["", "forty", "4 2", "42 or 43", "9" * 10, "--4", "٤٢", "4.2"])
def test_guess_that_is_no_number_is_told_so_and_counts(text):
    told, _, last = play(text, "41", "41")
    assert "not a number" in told.messages[0]["content"] and told.reward == 0.0
    assert last.done


@pytest.mark.parametrize("style", ["words", "short"])
def test_halving_wins_every_row(style):
    rows = guess.rows(5, {"style": style})
    for i in range(300):
        row = rows(i)
        game = Guess()
        game.reset(dict(row.metadata) | {"answer": row.answer})
        low, high = row.metadata["low"], row.metadata["high"]
        while True:
            middle = (low + high) // 2
            step = game.step(str(middle))
            if step.done:
                break
            is_higher = ("higher" if style == "words" else ">") in step.messages[0]["content"]
            low, high = (middle + 1, high) if is_higher else (low, middle - 1)
        assert step.reward == 1.0
