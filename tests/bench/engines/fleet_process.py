"""Actors of many simulated engines, all in this process: a fresh fleet for every session.

python -m tests.bench.engines.fleet_process CORE      (started by tests.bench.rig.rig)

Store, claims, weights, rewards and the actors are the real ones; each actor has a store and a copy of the weights of
its own, as if it were alone. Only the engines are paced (`tests.bench.rig.paced_engine`): one process holds hundreds of
responses at once, which no machine without GPUs could generate.
"""

import asyncio
import contextlib
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging

from actor.weights.model_folder import ModelFolder, read_model_folder
from bridge.rollout_types import Version
from bridge.store import sqlite_database
from configs import overrides
from launch import cli
from launch.tools.profile_machine.profile_worker import RpcServer
from tests.bench.engines.batch_rollout import roll_out
from tests.bench.rig.load import LoadLog
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import HashRewards, ReplayEngine
from tests.bench.rig.serving import serve
from tests.bench.rig.session import Session

THREADS_PER_ACTOR = 6
"""Calls of the store: one waits all the time, others renew, claim, beat."""
LATE_LOOK_S = 0.05
"""How often it is looked how late this process is."""
STORE_LOOK_S = 0.02
"""How often each actor looks whether the store has changed. Alone on its core it looks four times as often."""


class Fleet:
    """Answers requests one after the other."""

    def __init__(self, parent: RpcServer) -> None:
        self._parent = parent
        self._model: ModelFolder | None = None
        self._serving: list[asyncio.Task[None]] = []
        self._load: LoadLog | None = None
        self._lateness: asyncio.Task[None] | None = None
        self._late_s: list[float] = []

    async def run(self) -> None:
        while (request := await asyncio.to_thread(self._parent.receive)) is not None:
            answer = await getattr(self, f"_do_{request.pop('do')}")(**request)
            self._parent.answer(answer)

    async def _do_start_engine(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        self._model = read_model_folder(
            pathlib.Path(model_folder), dtype=overrides.from_dict(config).model.served_dtype
        )
        return {"started": True}

    async def _do_begin(self, session: dict[str, Any]) -> dict[str, Any]:
        """Starts as many actors as the session's config has engines."""
        parsed = Session.from_json(session)
        assert self._model is not None
        threads = ThreadPoolExecutor(THREADS_PER_ACTOR * parsed.config.actor.num_engines)
        asyncio.get_running_loop().set_default_executor(threads)
        bound = parsed.config.max_lag_steps if parsed.config.publish.when == "every" else None
        for index, replay in enumerate(_engines(parsed, version=None)):
            load = None
            if index == 0:  # one of many: each look costs all of them
                load = self._load = LoadLog(lambda replay=replay: replay.stats)
            task = asyncio.create_task(serve(f"actor-{index}", parsed, replay, self._model, load, max_lag_steps=bound))
            task.add_done_callback(self._ended)
            self._serving.append(task)
        self._late_s = []
        self._lateness = asyncio.create_task(self._watch_lateness())
        return {"serving": len(self._serving)}

    async def _do_end(self) -> dict[str, Any]:
        """Stops them. Says what the first engine ran meanwhile, and how late this process was (95th percentile)."""
        for task in self._serving:
            task.cancel()
        for task in self._serving:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._lateness is not None:
            self._lateness.cancel()
        late_s = float(np.quantile(self._late_s, 0.95)) if self._late_s else 0.0
        assert self._load is not None
        running, self._serving = self._load.seen, []
        return {"running": running, "late_s": late_s}

    async def _do_roll_out(self, session: dict[str, Any], problems: list[tuple[list[int], str]]) -> dict[str, Any]:
        """Rounds of the batch rollout: what a schedule without queues does on these engines."""
        parsed = Session.from_json(session)
        rounds = parsed.config.run.num_updates * parsed.config.rounds.groups_per_update
        return {
            "rounds_s": await roll_out(
                _engines(parsed, version=Version(incarnation=0, step=0)),
                [np.asarray(tokens, np.int32) for tokens, _ in problems],
                [HashRewards(parsed.flat_share).is_flat(answer) for _, answer in problems],
                parsed.config,
                num_rounds=rounds // parsed.config.rounds.groups_per_round,
            )
        }

    async def _watch_lateness(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(LATE_LOOK_S)
            self._late_s.append(time.monotonic() - start - LATE_LOOK_S)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            logging.error("session failed", exc_info=error)
            self._parent.fail(error)


def _engines(session: Session, *, version: Version | None) -> list[ReplayEngine]:
    assert session.engine is not None
    engines = [PacedEngine(session.engine, version=version) for _ in range(session.config.actor.num_engines)]
    return [ReplayEngine(engine, session.lengths) for engine in engines]


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    parent = RpcServer()
    cli.log_to_stderr()
    sqlite_database.LOOK_S = STORE_LOOK_S
    try:
        asyncio.run(Fleet(parent).run())
    except BaseException as e:
        logging.error("the fleet ends", exc_info=e)
        parent.fail(e)
        raise


if __name__ == "__main__":
    main()
