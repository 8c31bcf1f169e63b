"""Which of TextArena's games can be played here: tries them all, and writes the list that the adapter goes by.

`python -m tests.bench.textarena_games` plays each game of the installed release without a network, twice from the same
seed in two processes, by moves that it shows in brackets, and writes `configs/tasks/textarena_games.json`, from
which the docs site makes its environment catalog. Takes some minutes. One that can be played

- resets with as few players as it takes, the policy's seat being the last, and shows the same start to the same seed
  (a group is compared over it): so the other seats have made moves that it takes,
- lets a legal move be found for the policy's seat, too, if there are others: on another row somebody else has it,
- takes moves until it is over or `NUM_MOVES` were made, without an exception and within the deadlines.
"""

import asyncio
import json
import pathlib
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from actor.environments.environment_pool import EnvironmentPool
from actor.environments.protocol import EpisodeError
from configs.sections.actor import EnvironmentsConfig
from configs.tasks import textarena
from tests.bench import textarena_trial

SITE = sysconfig.get_path("purelib") + "/"
ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_MOVES = 12
MAX_PLAYERS = 6
SEED = 7
COMMAND = (sys.executable, "-P", "-m", "tests.bench.textarena_offline")


async def try_game(pool: EnvironmentPool, game: str) -> dict[str, str | int]:
    """How many players it takes, and what is wrong with it."""
    problem, wanted = "", 0
    for num_players in range(1, MAX_PLAYERS + 1):
        row = {"game": game, "num_players": num_players, "seat": num_players - 1, "seed": SEED}
        try:
            starts = [await _play(pool, row) for _ in range(2)]
        except EpisodeError as e:
            told = " ".join(str(e).replace(SITE, "").split()).replace("*", "")
            told = told.removeprefix(f"environment {textarena_trial.NAME}: ").removeprefix("RuntimeError: ")
            # With the wrong number of players it says so, or breaks; what it says else is what matters.
            if not problem or (_is_of_players(problem) and not _is_of_players(told)):
                problem, wanted = told, num_players
            continue
        if starts[0] != starts[1]:
            return {"num_players": num_players, "problem": "the same seed does not start the same game"}
        return {"num_players": num_players, "problem": ""}
    return {"num_players": wanted, "problem": problem[:160]}


async def _play(pool: EnvironmentPool, row: Mapping[str, Any]) -> list[dict[str, str]]:
    async with pool.open(textarena_trial.NAME) as process:
        start = await process.reset(row)
        for move in range(NUM_MOVES):
            seen = await process.step(str(move))
            if seen.done:
                break
    return start.messages


def _is_of_players(told: str) -> bool:
    return "players" in told.lower() or "player " in told.lower() or told.startswith(("KeyError", "AssertionError"))


async def main() -> None:
    """Tries all games and writes the file."""
    from textarena.envs.registration import ENV_REGISTRY

    games = {i: str(s.entry_point) for i, s in ENV_REGISTRY.items() if not i.endswith(("-raw", "-train"))}
    config = EnvironmentsConfig(call_timeout_s=30.0, max_processes=2)
    pool = EnvironmentPool(config, own=(textarena_trial.NAME,), command=COMMAND)
    tried: dict[str, dict[str, str | int]] = {}
    try:
        for game in sorted(games):
            tried[game] = await try_game(pool, game)
            print(game, tried[game], flush=True)
    finally:
        await pool.close()
    file = ROOT / "configs/tasks" / textarena.GAMES_FILE
    lines = ",\n".join(f" {json.dumps(game)}: {json.dumps(found)}" for game, found in tried.items())
    file.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    asyncio.run(main())
