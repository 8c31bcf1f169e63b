"""TextArena games by id (`GuessTheNumber-v0`). `textarena_games.json` lists the playable games."""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Callable

from configs.tasks.rows import Args, EpisodeRow, draw, read_args

NAME = "textarena"
GAMES_FILE = "textarena_games.json"
"""Test results of all games of the release, written by `python -m tests.bench.textarena_games`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextArenaArgs:
    """Arguments of the TextArena rows."""

    games: str = "GuessTheNumber-v0"
    """Comma-separated game ids. Each row draws one."""
    seat: int = -1
    """Seat of the policy in a game of two players. -1: drawn per row."""


def rows(seed: int, args: Args) -> Callable[[int], EpisodeRow]:
    """Returns row i as a function of (seed, i). Raises ValueError for an invalid argument or an unplayable game."""
    wanted = read_args(TextArenaArgs, NAME, args)
    games = [g.strip() for g in wanted.games.split(",")]
    players = [num_players(g) for g in games]
    if not all(-1 <= wanted.seat < n for n in players):
        raise ValueError(
            f"environment textarena: seat: expected a player number from 0, or -1 for a random one, got {wanted.seat}"
        )

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
        # The game explains its rules. The seed makes each question unique, so that it can be held out.
        question = f"Game {metadata['seed']} of {games[at]}. Reply with your move."
        return EpisodeRow(question=question, role="system", metadata=metadata)

    return row


def num_players(game: str) -> int:
    """Returns the number of seats of a game. Raises ValueError if it is unknown or unplayable."""
    found = tried_games().get(game)
    if found is None:
        raise ValueError(f"TextArena has no game {game!r} (configs/tasks/textarena_games.json lists them)")
    if found["problem"]:
        raise ValueError(f"TextArena game {game} cannot be played: {found['problem']} (docs/environments.md)")
    return int(found["num_players"])


@functools.cache
def tried_games() -> dict[str, dict[str, str | int]]:
    """Returns by game id `num_players` and `problem`, which is empty for a playable game."""
    return json.loads((importlib.resources.files("configs.tasks") / GAMES_FILE).read_text())
