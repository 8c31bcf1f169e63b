"""TextArena's games by their ids (`GuessTheNumber-v0`); docs/environments.md lists which of them can be played."""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Callable

from configs.tasks.rows import Args, EpisodeRow, draw, read_args

NAME = "textarena"
GAMES_FILE = "textarena_games.json"
"""Every game of the release, tried: written by `python -m tests.bench.textarena_games`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextArenaArgs:
    """What is played."""

    games: str = "GuessTheNumber-v0"
    """Ids, "," between them; each row is of one, by chance."""
    seat: int = -1
    """The policy's, in a game of two; -1: either, by chance."""


def rows(seed: int, args: Args) -> Callable[[int], EpisodeRow]:
    """Row i as a function of (seed, i).

    Raises:
      ValueError: an argument is none, or a game can't be played.
    """
    wanted = read_args(TextArenaArgs, NAME, args)
    games = [g.strip() for g in wanted.games.split(",")]
    players = [num_players(g) for g in games]
    if not all(-1 <= wanted.seat < n for n in players):
        raise ValueError(f"environment textarena: seat must be -1 or one of the game's players, got {wanted.seat}")

    def row(index: int) -> EpisodeRow:
        random_ = draw(seed, index)
        at = random_.randrange(len(games))
        seat = random_.randrange(players[at]) if wanted.seat < 0 else wanted.seat
        metadata = {
            "game": games[at],
            "num_players": players[at],
            "seat": seat,
            "seed": random_.randrange(2**31),
        }
        # The game tells its rules itself; its number makes each a question of its own, to be held out or not.
        question = f"Game {metadata['seed']} of {games[at]}. Reply with your move."
        return EpisodeRow(question=question, role="system", metadata=metadata)

    return row


def num_players(game: str) -> int:
    """Seats of a game that can be played.

    Raises:
      ValueError: there is no such game, or why it can't be played.
    """
    found = tried_games().get(game)
    if found is None:
        raise ValueError(f"TextArena has no game {game!r} (docs/environments.md lists them)")
    if found["problem"]:
        raise ValueError(f"TextArena's {game} can't be played: {found['problem']} (docs/environments.md)")
    return int(found["num_players"])


@functools.cache
def tried_games() -> dict[str, dict[str, str | int]]:
    """By id: `num_players`, and `problem`, empty for one that can be played."""
    return json.loads((importlib.resources.files("configs.tasks") / GAMES_FILE).read_text())
