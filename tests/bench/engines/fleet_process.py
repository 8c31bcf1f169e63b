"""Actors of many simulated engines in one process: `python -m tests.bench.engines.fleet_process CORE` (by rig.py).

Store, claims, weights, rewards and the actors are the real ones; each actor has a store and a copy of the weights of
its own, as if it were alone. Only the engines are paced (`tests.bench.rig.paced_engine`): one process holds hundreds of
responses at once, which no machine without GPUs could generate.
"""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bridge.rollout_types import Version
from bridge.store import sqlite_database
from tests.bench.engines.batch_rollout import roll_out
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import HashRewards, ReplayEngine
from tests.bench.rig.serving import Server, run_server
from tests.bench.rig.session import Session

THREADS_PER_ACTOR = 6
"""Calls of the store: one waits all the time, others renew, claim, beat."""
LATE_LOOK_S = 0.05
"""How often it is looked how late this process is."""
STORE_LOOK_S = 0.02
"""How often each actor looks whether the store has changed. Alone on its core it looks four times as often."""


class Fleet(Server):
    """As many actors as a session's config has engines."""

    async def engines(self, session: Session) -> list[ReplayEngine]:
        threads = ThreadPoolExecutor(THREADS_PER_ACTOR * session.config.actor.num_engines)
        asyncio.get_running_loop().set_default_executor(threads)
        self._late_s: list[float] = []
        self._lateness = asyncio.create_task(self._watch_lateness())
        return _engines(session, version=None)

    async def end(self) -> dict[str, Any]:
        """Returns how late this process was (95th percentile)."""
        self._lateness.cancel()
        return {"late_s": float(np.quantile(self._late_s, 0.95)) if self._late_s else 0.0}

    async def do_roll_out(self, session: dict[str, Any], problems: list[tuple[list[int], str]]) -> dict[str, Any]:
        """Runs rounds of the batch rollout: what a schedule without queues does on these engines."""
        parsed = Session.from_json(session)
        rounds = parsed.config.run.num_updates * parsed.config.rounds.groups_per_update
        seconds = await roll_out(
            _engines(parsed, version=Version(incarnation=0, step=0)),
            [np.asarray(tokens, np.int32) for tokens, _ in problems],
            [HashRewards(parsed.flat_share).is_flat(answer) for _, answer in problems],
            parsed.config,
            num_rounds=rounds // parsed.config.rounds.groups_per_round,
        )
        return {"rounds_s": seconds}

    async def _watch_lateness(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(LATE_LOOK_S)
            self._late_s.append(time.monotonic() - start - LATE_LOOK_S)


def _engines(session: Session, *, version: Version | None) -> list[ReplayEngine]:
    assert session.engine is not None
    engines = [PacedEngine(session.engine, version=version) for _ in range(session.config.actor.num_engines)]
    return [ReplayEngine(engine, session.lengths) for engine in engines]


if __name__ == "__main__":
    sqlite_database.LOOK_S = STORE_LOOK_S
    run_server(Fleet, sys.argv[1])
