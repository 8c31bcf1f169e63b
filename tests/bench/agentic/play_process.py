"""The rig's actor for episodes: `python -m tests.bench.agentic.play_process CORE` (started by rig.py).

A paced engine, real environments' processes. It keeps no core to itself: those processes inherit what it may use.
"""

from typing import Any

from actor.environments.chat_render import read_rendering
from tests.bench.rig.episodes import EpisodeEngine
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import ReplayEngine
from tests.bench.rig.serving import Server, run_server
from tests.bench.rig.session import Session


class Player(Server):
    """One engine, whose responses are a session's episodes."""

    _engine: EpisodeEngine

    async def engines(self, session: Session) -> list[ReplayEngine]:
        assert self.model is not None and session.engine is not None and session.episodes is not None
        self._engine = EpisodeEngine(
            PacedEngine(session.engine),
            session.episodes,
            read_rendering(self.model.path, "off"),
            max_context_tokens=session.config.model.max_tokens,
        )
        await self._engine.load()
        return [self._engine]

    async def end(self) -> dict[str, Any]:
        """Ends the environments. Raises RuntimeError if episodes failed."""
        failures = dict(self._engine.pool.failures)
        await self._engine.close()
        if any(failures.values()):
            raise RuntimeError(f"episodes failed: {failures}")
        return {}


if __name__ == "__main__":
    run_server(Player, None)
