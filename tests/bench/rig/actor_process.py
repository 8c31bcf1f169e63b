"""The rig's actor with vLLM on one core: `python -m tests.bench.rig.actor_process CORE` (started by rig.py)."""

import dataclasses
import sys
from typing import Any

from actor.vllm.engine import VllmEngine
from actor.vllm.engine_setup import tune_gc
from configs.schema import Config
from configs.sections import ActorConfig
from launch.tools.profile_machine.measure_engine import profile_engine
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.replay import ReplayEngine
from tests.bench.rig.serving import Server, run_server
from tests.bench.rig.session import Session

tune_gc()  # as in launch/actor.py: also in the engine's process


class RealServer(Server):
    """One vLLM engine, which lives as long as the process."""

    _engine: VllmEngine
    _actor: ActorConfig

    async def start(self, config: Config) -> None:
        assert self.model is not None
        self._actor = config.actor
        self._engine = VllmEngine.start(self.model.path, config, expected=self.model.tensors)

    async def engines(self, session: Session) -> list[ReplayEngine]:
        """Returns a paced one, or the real one with as many places as the session is to have."""
        if session.engine is not None:
            return [ReplayEngine(PacedEngine(session.engine), session.lengths)]
        wanted, there = session.config.actor.max_num_seqs, self._engine.size.max_num_seqs
        self._engine = self._engine.for_run(dataclasses.replace(session.config, actor=self._actor))
        return [ReplayEngine(self._engine, session.lengths, places=wanted if wanted < there else None)]

    async def do_profile(self, counts: list[int], num_tokens: int) -> dict[str, Any]:
        """Decodes at several numbers of running sequences; the engine serves the last session's weights."""
        return await profile_engine(self._engine, counts=counts, num_tokens=num_tokens)

    async def close(self) -> None:
        await self._engine.close()


if __name__ == "__main__":
    run_server(RealServer, sys.argv[1])
