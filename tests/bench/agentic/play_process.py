"""The rig's actor for episodes: a paced engine, real environments' processes, a fresh `Actor` for every session.

python -m tests.bench.agentic.play_process CORE      (started by tests.bench.rig.rig)

It keeps no core to itself: the environments' processes inherit what it may use.
"""

import asyncio
import contextlib
import pathlib
from typing import Any

from absl import logging

from actor.environments.chat_render import read_rendering
from actor.weights.model_folder import ModelFolder, read_model_folder
from configs import overrides
from launch import cli
from launch.tools.profile_machine.profile_worker import RpcServer
from tests.bench.rig.episodes import EpisodeEngine
from tests.bench.rig.load import LoadLog
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.serving import serve
from tests.bench.rig.session import Session

NAME = "actor-0"


class Server:
    """Answers requests one after the other."""

    def __init__(self, parent: RpcServer) -> None:
        self._parent = parent
        self._model: ModelFolder | None = None
        self._engine: EpisodeEngine | None = None
        self._serving: asyncio.Task[None] | None = None
        self._load: LoadLog | None = None

    async def run(self) -> None:
        while (request := await asyncio.to_thread(self._parent.receive)) is not None:
            answer = await getattr(self, f"_do_{request.pop('do')}")(**request)
            self._parent.answer(answer)

    async def _do_start_engine(self, config: dict[str, Any], model_folder: str) -> dict[str, Any]:
        dtype = overrides.from_dict(config).model.served_dtype
        self._model = read_model_folder(pathlib.Path(model_folder), dtype=dtype)
        return {"started": True}

    async def _do_begin(self, session: dict[str, Any]) -> dict[str, Any]:
        """Starts serving a session's store."""
        parsed, model = Session.from_json(session), self._model
        assert model is not None and parsed.engine is not None and parsed.episodes is not None
        engine = self._engine = EpisodeEngine(
            PacedEngine(parsed.engine),
            parsed.episodes,
            read_rendering(model.path, "off"),
            max_context_tokens=parsed.config.model.max_tokens,
        )
        await engine.load()
        self._load = LoadLog(lambda: engine.stats)
        bound = parsed.config.max_lag_steps if parsed.config.publish.when == "every" else None
        self._serving = asyncio.create_task(serve(NAME, parsed, engine, model, self._load, max_lag_steps=bound))
        self._serving.add_done_callback(self._ended)
        return {"serving": True}

    async def _do_end(self) -> dict[str, Any]:
        """Stops serving, and the environments; says what failed of them."""
        assert self._serving is not None and self._load is not None and self._engine is not None
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        failures = sum(self._engine.pool.failures.values())
        if failures:
            raise RuntimeError(f"{failures} episodes failed: {dict(self._engine.pool.failures)}")
        await self._engine.close()
        return {"running": self._load.seen}

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            assert error is not None
            logging.error("session failed", exc_info=error)
            self._parent.fail(error)


def main() -> None:
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
