"""The rig's actor: one real engine on one core, and a fresh `Actor` on it for every session.

python -m tests.bench.rig.actor_process CORE      (started by rig.py)
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import sys
from typing import Any

from absl import logging

from actor.vllm.engine import VllmEngine
from actor.weights.model_folder import ModelFolder, read_model_folder
from configs import overrides
from launch import cli
from launch.tools.profile_machine.measure_engine import profile_engine
from launch.tools.profile_machine.profile_worker import RpcServer
from tests.bench.rig.load import LoadLog
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import ReplayEngine
from tests.bench.rig.serving import serve
from tests.bench.rig.session import Session

NAME = "actor-0"


class Server:
    """Answers requests one after the other; the engine lives as long as the process."""

    def __init__(self, parent: RpcServer) -> None:
        self._parent = parent
        self._engine: VllmEngine | None = None
        self._model: ModelFolder | None = None
        self._serving: asyncio.Task[None] | None = None
        self._load: LoadLog | None = None

    async def run(self) -> None:
        while (request := await asyncio.to_thread(self._parent.receive)) is not None:
            answer = await getattr(self, f"_do_{request.pop('do')}")(**request)
            self._parent.answer(answer)
        if self._engine is not None:
            await self._engine.close()

    async def _do_start_engine(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        parsed = overrides.from_dict(config)
        self._model = read_model_folder(pathlib.Path(model_folder), dtype=parsed.model.served_dtype)
        self._engine = VllmEngine.start(self._model.path, parsed, expected=self._model.tensors)
        return {"started": True}

    async def _do_begin(self, session: dict[str, Any]) -> dict[str, Any]:
        """Starts serving a session's store."""
        parsed = Session.from_json(session)
        replay = self._engine_for(parsed)
        self._load = LoadLog(lambda: replay.stats)
        assert self._model is not None
        self._serving = asyncio.create_task(serve(NAME, parsed, replay, self._model, self._load))
        self._serving.add_done_callback(self._ended)
        return {"serving": True}

    async def _do_end(self) -> dict[str, Any]:
        """Stops serving; what is in progress is given up. Says what the engine ran meanwhile (`load.LoadLog`)."""
        assert self._serving is not None and self._load is not None
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        return {"running": self._load.seen}

    async def _do_profile(self, counts: list[int], num_tokens: int) -> dict[str, Any]:
        """Decodes at several numbers of running sequences; the engine serves the last session's weights."""
        assert self._engine is not None
        return await profile_engine(self._engine, counts=counts, num_tokens=num_tokens)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            logging.error("session failed", exc_info=error)
            self._parent.fail(error)

    def _engine_for(self, session: Session) -> ReplayEngine:
        """The session's: a paced one, or the real one with as many places as the session is to have."""
        assert self._engine is not None
        if session.engine is not None:
            return ReplayEngine(PacedEngine(session.engine), session.lengths)
        wanted, there = session.config.actor.max_num_seqs, self._engine.size.max_num_seqs
        whole = dataclasses.replace(session.config.actor, max_num_seqs=there)
        self._engine = self._engine.for_run(dataclasses.replace(session.config, actor=whole))
        return ReplayEngine(self._engine, session.lengths, places=wanted if wanted < there else None)


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    parent = RpcServer()
    cli.log_to_stderr()
    try:
        asyncio.run(Server(parent).run())
    except BaseException as e:
        logging.error("the rig's actor ends", exc_info=e)
        parent.fail(e)
        raise


if __name__ == "__main__":
    main()
