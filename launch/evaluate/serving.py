"""The engine, the verifiers and the environments of an evaluation, and the job over them."""

import contextlib
import os
import pathlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from actor.responses import ResponseReader
from actor.rewards.scheduler import Rewards
from actor.sampling import Sampler
from actor.verifiers.judge import Judge
from actor.weights.model_folder import tensor_table
from bridge.timeline import Timeline
from bridge.types import Group, Version
from configs.schema import Config
from launch.evaluate.problems import Problems
from launch.evaluate.progress import Progress
from launch.evaluate.runner import Runner, tickets_of
from launch.placement import bind_to_cores, core_ids
from launch.startup.build_actor import build_episodes, build_scorer

if TYPE_CHECKING:
    from actor.vllm.engine import VllmEngine


def start_engine(model: pathlib.Path, config: Config, *, seed: int) -> "VllmEngine":
    """The engine with the folder's weights; takes long.

    Raises:
      Exception: it does not start; vLLM says why.
    """
    if config.actor.cpu_cores:
        bind_to_cores(core_ids(config.actor.cpu_cores))
    if config.actor.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.actor.devices.partition(";")[0]
    from actor.vllm.engine import VllmEngine  # vLLM is loaded only once the input is known to be good

    table = tensor_table(model, dtype=config.model.served_dtype)
    return VllmEngine.start(model, config, expected=table, has_own_weights=True, seed=seed)


class Job:
    """Asks all sets, one after the other."""

    def __init__(
        self,
        config: Config,
        problems: Problems,
        engine: "VllmEngine",
        timeline: Timeline,
        judge: Judge | None,
        version: Version,
    ) -> None:
        """Nothing is asked; `version` is what the weights are called."""
        self._config, self._problems, self._engine = config, problems, engine
        self._timeline, self._judge, self._version = timeline, judge, version

    async def run(self, progress: Progress) -> dict[str, list[Group]]:
        """The groups of each set, by its name; the engine is closed at the end, whatever happens.

        Raises:
          ExceptionGroup: of what is no fault of a problem's (EngineDeadError).
        """
        config, tokenizer = self._config, self._problems.tokenizer
        async with self._parts() as (sampler, rewards):
            runner = Runner(
                sampler,
                rewards,
                read=ResponseReader(tokenizer.backend, tokenizer.chat, thinking_marks=config.model.thinking_marks),
                places=max(config.actor.max_num_seqs, config.environments.max_in_flight),
                max_attempts=config.actor.max_attempts,
            )
            groups: dict[str, list[Group]] = {}
            for place, one in enumerate(self._problems.sets):
                tickets = tickets_of(one, version=self._version, stop_token_ids=tokenizer.stop_token_ids, place=place)
                progress.begin(one.name)
                groups[one.name] = await runner.run(tickets, done=progress.done)
            return groups

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncIterator[tuple[Sampler, Rewards]]:
        """Made inside the loop that uses them."""
        config, engine = self._config, self._engine
        async with contextlib.AsyncExitStack() as parts:
            parts.push_async_callback(engine.close)
            await engine.serve_own_weights(self._version)
            rewards = build_scorer(config, self._judge)
            parts.push_async_callback(rewards.close)
            episodes = build_episodes(config, engine, pathlib.Path(config.model.path))
            if episodes is not None:
                parts.push_async_callback(episodes.close)
            yield Sampler(engine, timeline=self._timeline, lag_bound=None, episodes=episodes), rewards
