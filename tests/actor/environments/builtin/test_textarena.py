import asyncio
import importlib.util
from typing import TYPE_CHECKING

import pytest

from actor.environments.environment_pool import EnvironmentPool
from actor.environments.protocol import Step
from configs.sections.actor import EnvironmentsConfig
from configs.tasks import textarena

if TYPE_CHECKING:
    from actor.environments.builtin.textarena import TextArena

# The library is imported by the tests: with nltk and scipy it takes seconds.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="the extra `textarena` is not installed"
)
PLAYABLE = {game: told for game, told in textarena.tried_games().items() if not told["problem"]}


def play_in(game: "TextArena", row: dict, actions) -> list[Step]:
    seen = [Step(messages=game.reset(row))]
    for action in actions:
        seen.append(game.step(action))
        if seen[-1].done:
            break
    return seen


def play(row: dict, actions) -> list[Step]:
    """An episode in this process; `test_environment_pool.py` has the one around it."""
    from actor.environments.builtin.textarena import TextArena

    return play_in(TextArena(), row, actions)


def play_apart(row: dict, actions) -> list:
    """An episode in a process of its own, as in a run."""

    async def body():
        pool = EnvironmentPool(EnvironmentsConfig())
        try:
            async with pool.open("textarena") as process:
                seen = [await process.reset(row)]
                while not seen[-1].done and len(seen) <= len(actions):
                    seen.append(await process.step(actions[len(seen) - 1]))
                return seen
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(body(), 120))


def row_of(game: str, *, seat: int = 0, seed: int = 1) -> dict:
    return {"game": game, "num_players": textarena.num_players(game), "seat": seat, "seed": seed}


def said(step) -> str:
    return step.messages[0]["content"]


@pytest.mark.heavy
def test_guess_the_number_is_won_by_halving():
    """Played by what it says alone; each observation holds only what is new."""
    from actor.environments.builtin.textarena import TextArena

    game = TextArena()
    assert "between 1 and 20" in game.reset(row_of("GuessTheNumber-v0"))[0]["content"]
    low, high = 1, 20
    while True:
        middle = (low + high) // 2
        step = game.step(str(middle))  # without brackets, which the game wants
        if step.done:
            break
        assert "between 1 and 20" not in said(step) and len(step.messages) == 1
        low, high = (middle + 1, high) if "higher" in said(step) else (low, middle - 1)
    assert step.reward == 1.0


@pytest.mark.heavy
def test_same_row_is_the_same_episode_in_any_process():
    actions = ["[4]", "[0]", "[8]", "[2]"]
    first, again = (play_apart(row_of("TicTacToe-v0", seat=1, seed=3), actions) for _ in range(2))
    assert first == again
    here = play(row_of("TicTacToe-v0", seat=1, seed=3), actions)
    assert [(s.messages, s.reward, s.done) for s in first] == [(s.messages, s.reward, s.done) for s in here]
    assert first[0].messages != play(row_of("TicTacToe-v0", seat=1, seed=4), actions)[0].messages


@pytest.mark.heavy
def test_reward_is_the_policys_seat():
    """Whoever moves where none may twice loses, on either seat."""
    for seat in (0, 1):
        seen = play(row_of("TicTacToe-v0", seat=seat), ["[99]"] * 3)
        assert seen[-1].done and seen[-1].reward == -1.0
        assert [s.reward for s in seen[:-1]] == [0.0] * (len(seen) - 1)


@pytest.mark.heavy
def test_invalid_move_whose_reason_a_game_gives_for_its_reward_is_minus_one():
    seen = play(row_of("Cryptarithm-v0"), ["nonsense"] * 4)
    assert seen[-1].done and seen[-1].reward == -1.0


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("game", "action"),
    [("SpiteAndMalice-v0", "[play]"), ("TicTacToe-v0", f"[{'9' * 5000}]"), ("GuessTheNumber-v0", f"[{'9' * 5000}]")],
)
def test_move_at_which_a_game_raises_is_an_invalid_one(game, action):
    seen = play(row_of(game), [action])
    assert seen[-1].done and seen[-1].reward == -1.0 and "ValueError" in seen[-1].info["raised"]


@pytest.mark.heavy
@pytest.mark.parametrize("game", ["QuantumTicTacToe-v0", "PublicGoodsGame-v0"])
def test_game_of_several_that_one_player_may_start_is_refused(game):
    """One sets a table for two and breaks at the second move; the other is a public good of a public of one."""
    with pytest.raises(ValueError, match="is played by 2 players, not by 1"):
        play(row_of(game) | {"num_players": 1}, [])
    assert PLAYABLE[game]["num_players"] == 2


@pytest.mark.heavy
def test_game_of_two_in_the_form_that_it_shows_is_played_to_its_end():
    seen = play(row_of("QuantumTicTacToe-v0"), [f"[{a},{b}]" for a, b in ((0, 4), (3, 5), (0, 1), (2, 6), (7, 8))])
    assert len(seen) > 2 and all("raised" not in s.info for s in seen[1:])


@pytest.mark.heavy
def test_trial_of_a_game_finds_a_legal_move_or_says_so():
    from tests.bench.textarena_trial import Trial

    trial = Trial()
    trial.reset(row_of("TicTacToe-v0", seat=1))
    assert not trial.step("0").done
    with pytest.raises(ValueError, match="no legal move was found for the last seat"):
        game = Trial()
        game.reset({"game": "LinesOfAction-v0", "num_players": 2, "seat": 1, "seed": 7})
        game.step("0")


def test_list_of_games_has_both_kinds_and_reasons():
    alone = [g for g, told in PLAYABLE.items() if told["num_players"] == 1]
    by_two = [g for g, told in PLAYABLE.items() if told["num_players"] == 2]
    assert {"GuessTheNumber-v0", "Sudoku-v0-very-easy"} <= set(alone) and "TicTacToe-v0" in by_two
    assert "LookupError" in str(textarena.tried_games()["Wordle-v0"]["problem"])
