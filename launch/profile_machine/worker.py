"""One of the two processes that `launch.profile_machine` measures with: the learner's side or the engine's.

python -m launch.profile_machine.worker learner|engine RUN_FOLDER      (started by profile_machine)
"""

import asyncio
import dataclasses
import sys
import time
from typing import Any

import msgspec
import numpy as np
from absl import logging

from bridge.timeline import Timeline
from bridge.types import Sampling, Task
from configs.run_folder import RunFolder, run_id, snapshot_folder
from launch import command_line
from launch.processes import by_hand
from launch.processes.pipes import Parent

_NAME = "profile"


class LearnerSide:
    """Publishes, trains, and knows the prompts."""

    def __init__(self, prepared: command_line.Prepared) -> None:
        """Opens the run."""
        from learner.start import open_run

        self._run = open_run(prepared.config, prepared.folder, prepared.model_folder)
        self._num_publishes = 0

    def publish(self) -> dict[str, Any]:
        """Exports and announces the weights as the next version."""
        self._run.publisher.publish(self._run.trainer.weights_out(), step=self._num_publishes)
        self._run.publisher.finish()
        self._num_publishes += 1
        return {"export_s": self._run.publisher.last_publish_s}

    def training(self) -> dict[str, Any]:
        """The `learner` part of a profile."""
        from launch.profile_machine.learner import profile_learner

        trainer = self._run.trainer
        profile, trainer.state = profile_learner(
            trainer.config, trainer.steps, trainer.anchors, trainer.state, base=trainer.frozen
        )
        return profile

    def problems(self, count: int) -> dict[str, Any]:
        """Prompts of the run, one of their tasks, and what ends a response."""
        found = [next(self._run.stream.prompts) for _ in range(count)]
        task = found[0].task
        return {
            "prompts": [p.prompt_tokens.tolist() for p in found],
            "task": dataclasses.asdict(task),
            "stop_token_ids": list(self._run.tokenizer.stop_token_ids),
        }

    def close(self) -> None:
        """Frees the shared memory."""
        self._run.close()


class EngineSide:
    """Generates, takes over weights, and judges."""

    def __init__(self, prepared: command_line.Prepared) -> None:
        """Starts the engine."""
        from actor.vllm.engine import VllmEngine
        from actor.weights.base_folder import for_adapters
        from actor.weights.client import WeightClient
        from actor.weights.local_copy import LocalCopy
        from actor.weights.model_folder import read_model_folder
        from actor.weights.source import LocalSource

        self._config = config = prepared.config
        model = for_adapters(read_model_folder(prepared.model_folder, dtype=config.model.served_dtype), config)
        self._copy = LocalCopy(snapshot_folder(config), _NAME)
        self._engine = VllmEngine.start(model.path, config, expected=model.tensors, base=model.base)
        self._timeline = Timeline(RunFolder(prepared.folder).events, _NAME)
        self._weights = WeightClient(
            LocalSource(
                snapshot_folder(config),
                self._copy.file,
                run=run_id(prepared.folder),
                tokenizer_hash=model.tokenizer_hash,
                expected=model.tensors,
            ),
            self._engine,
            timeline=self._timeline,
        )
        self._runner = asyncio.Runner()

    def update(self) -> dict[str, Any]:
        """Takes over the announced weights.

        Raises:
          RuntimeError: they were refused.
        """

        async def update() -> None:
            manifest = await self._weights.prefetch()
            if manifest is None or not await self._weights.swap(manifest):
                raise RuntimeError("the published weights were refused; see the log")

        self._runner.run(update())
        took = self._weights.timings
        return {"prefetch_s": took["prefetch_s"] + took["verify_s"], "pause_s": took["pause_s"]}

    def decoding(self, num_tokens: int, context_tokens: int) -> dict[str, Any]:
        """The `engine` part of a profile."""
        from launch.profile_machine.engine import counts_up_to, profile_engine

        return self._runner.run(
            profile_engine(
                self._engine,
                counts=counts_up_to(self._config.actor.max_num_seqs),
                num_tokens=num_tokens,
                context_tokens=context_tokens,
                max_tokens=self._config.model.max_tokens,
            )
        )

    def lengths(self, prompts: list[list[int]], stop_token_ids: list[int]) -> dict[str, Any]:
        """How long K responses to each prompt are."""
        sampling = Sampling(
            max_tokens=self._config.sampling.max_response_tokens,
            temperature=self._config.sampling.temperature,
            stop_token_ids=tuple(stop_token_ids),
        )

        async def length(prompt: list[int], name: str) -> int:
            tokens = np.asarray(prompt, np.int32)
            sample = await self._engine.sample(tokens, sampling, request_id=name, priority=0)
            return sample.tokens.size

        async def lengths() -> list[list[int]]:
            num_samples = range(self._config.rounds.samples_per_group)
            groups = [asyncio.gather(*(length(p, f"{n}.{i}") for i in num_samples)) for n, p in enumerate(prompts)]
            return [list(g) for g in await asyncio.gather(*groups)]

        return {"groups": self._runner.run(lengths())}

    def judging(self, task: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one verdict; its verifiers are loaded before."""
        from actor.rewards.scheduler import Rewards
        from actor.verifiers.judged import Response
        from actor.verifiers.pool import VerifierPool

        async def seconds() -> float:
            rewards, asked = Rewards(VerifierPool.of_config(self._config, num_workers=1)), msgspec.convert(task, Task)
            # What verifier=math takes for an answer.
            response = Response(text=f"\\boxed{{{asked.answer}}}", finish="stop", num_tokens=8)
            try:
                await rewards.judge(response, asked)
                start = time.perf_counter()
                await rewards.judge(response, asked)
                return time.perf_counter() - start
            finally:
                await rewards.close()

        return {"verifier_s": self._runner.run(seconds())}

    def close(self) -> None:
        """Ends the engine."""
        self._runner.run(self._engine.close())
        self._runner.close()
        self._weights.close()
        self._copy.close()
        self._timeline.close()


def main() -> None:
    """Answers requests until there are no more."""
    given = by_hand.arguments(sys.argv, "learner|engine RUN_FOLDER", command="launch.profile_machine")
    parent = Parent()
    command_line.log_to_stderr()
    role, folder = given
    side = None
    try:
        side = {"learner": LearnerSide, "engine": EngineSide}[role](command_line.open_prepared(folder))
        parent.answer({"ready": True})
        while (request := parent.receive()) is not None:
            parent.answer(getattr(side, request.pop("do"))(**request))
    except Exception as e:
        logging.error("%s side failed", role, exc_info=e)
        parent.fail(e)
        sys.exit(1)
    finally:
        if side is not None:
            side.close()


if __name__ == "__main__":
    main()
