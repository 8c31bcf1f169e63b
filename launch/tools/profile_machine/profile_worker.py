"""Worker of `launch.tools.profile_machine`: runs the learner or the engine to be measured.

It answers on a separate file descriptor, because libraries print to stdout.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
from absl import logging

from bridge.rollout_types import Sampling, Task
from bridge.timeline import Timeline
from configs import custom_functions
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch import cli
from launch.startup import prepare_run
from launch.supervision import process_tree
from launch.supervision.placement import of_one_engine

_ANSWERS = "SLUICE_ANSWERS_FD"
_LOG_TAIL = 3000
_END_S = 30.0


class ChildError(RuntimeError):
    """A process failed or timed out; the message has the end of its log."""


class RpcProcess:
    """Handle of a worker process (`python -P -m module arguments...`), which answers requests; it prints into `log`."""

    def __init__(
        self, module: str, arguments: list[str], log: pathlib.Path, *, env: dict[str, str] | None = None
    ) -> None:
        self.name = module.rsplit(".", 1)[-1]
        self._log = log
        read, write = os.pipe()
        self._answers = read
        self._buffer = b""
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=os.environ
                | {
                    "PYTHONPATH": custom_functions.python_path(),
                    _ANSWERS: str(write),
                    process_tree.VARIABLE: str(os.getpid()),
                }
                | (env or {}),
            )
        os.close(write)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a request; `wait_for` returns its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("exited") from None

    def failure(self, what: str) -> ChildError:
        """Returns an error that describes the process's failure, with the end of its log."""
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.exists() else ""
        return ChildError(f"{self.name} {what}; end of {self._log}:\n{tail}")

    def close(self) -> None:
        """Asks the process to exit, then terminates and kills it; also works after a failed `send`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a failed send leaves data in the buffer
            self.process.stdin.close()
        try:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    self.process.send_signal(number)
                try:
                    self.process.wait(_END_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            os.close(self._answers)

    def _read(self) -> None:
        """Queues all complete answers; raises ChildError if the process exited, or reports an error."""
        data = os.read(self._answers, 1 << 20)
        if not data:
            raise self.failure("exited")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise self.failure(f"failed: {answer['error']}")
            self._queue.append(answer)


def wait_for(child: RpcProcess, *others: RpcProcess, deadline_s: float) -> dict[str, Any]:
    """Returns the next answer of `child`; answers of the `others` stay queued.

    Raises ChildError if `child` or one of the `others` failed or exited, or the timeout expired.
    """
    end = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        for one in (child, *others):
            selector.register(one._answers, selectors.EVENT_READ, one)
        while not child._queue and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data._read()
    if child._queue:
        return child._queue.popleft()
    raise child.failure(f"timed out after {deadline_s:.0f} s")


class RpcServer:
    """Connection of a worker process to the tool that started it, with which the process dies."""

    def __init__(self) -> None:
        if _ANSWERS not in os.environ:
            process_tree.refuse("launch.tools.profile_machine", "no parent process to answer")
        process_tree.die_with_parent()
        self._out = os.fdopen(int(os.environ[_ANSWERS]), "w", buffering=1)

    def receive(self) -> dict[str, Any] | None:
        """Returns the next request; None if there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def answer(self, message: dict[str, Any]) -> None:
        """Answers the current request."""
        self._out.write(json.dumps(message) + "\n")

    def fail(self, error: BaseException) -> None:
        """Reports the error that ends this process, or the first one of a group."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.answer({"error": f"{type(error).__name__}: {error}"})


_NAME = "profile"


class LearnerSide:
    """Learner of the measurement: publishes, trains, and provides prompts."""

    def __init__(self, config: Config, prepared: prepare_run.PreparedRun) -> None:
        from learner.open_run import open_run

        self._run = open_run(config, prepared.folder, prepared.model_folder)
        self._num_publishes = 0

    def publish(self) -> dict[str, Any]:
        """Publishes the weights as the next version."""
        self._run.publisher.publish(self._run.trainer.published_params(), step=self._num_publishes)
        self._run.publisher.finish()
        self._num_publishes += 1
        return {"export_s": self._run.publisher.last_publish_s}

    def training(self) -> dict[str, Any]:
        """Measures the `learner` part of a profile."""
        from launch.tools.profile_machine.measure_learner import profile_learner

        trainer = self._run.trainer
        profile, trainer.state = profile_learner(
            trainer.config,
            trainer.steps,
            trainer.anchors,
            trainer.state,
            base=trainer.frozen,
            critic=trainer.critic,
        )
        return profile

    def problems(self, count: int) -> dict[str, Any]:
        """Returns prompts of the run, the task of the first one, and the stop tokens."""
        found = [next(self._run.stream.prompts) for _ in range(count)]
        task = found[0].task
        return {
            "prompts": [p.prompt_tokens.tolist() for p in found],
            "task": dataclasses.asdict(task),
            "stop_token_ids": list(self._run.tokenizer.stop_token_ids),
        }

    def close(self) -> None:
        """Closes the run and frees its shared memory."""
        self._run.close()


class EngineSide:
    """Engine of the measurement: generates, loads weights, and scores."""

    def __init__(self, config: Config, prepared: prepare_run.PreparedRun) -> None:
        from actor.vllm.engine import VllmEngine
        from actor.weights.client import WeightClient
        from actor.weights.model_folder import for_adapters, read_model_folder
        from actor.weights.source import LocalCopy, LocalSource

        self._config = config
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
        """Loads the announced weights; raises RuntimeError if the weights were rejected."""

        async def update() -> None:
            manifest = await self._weights.prefetch()
            if manifest is None or not await self._weights.swap(manifest):
                raise RuntimeError("the published weights were rejected; see the log")

        self._runner.run(update())
        took = self._weights.timings
        return {"prefetch_s": took["prefetch_s"] + took["verify_s"], "pause_s": took["pause_s"]}

    def decoding(self, num_tokens: int, context_tokens: int) -> dict[str, Any]:
        """Measures the `engine` part of a profile."""
        from launch.tools.profile_machine.measure_engine import counts_up_to, profile_engine

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
        """Samples K responses per prompt and returns their lengths."""
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
        """Measures the seconds per verdict, after loading the verifiers."""
        from actor.rewards.scorer import RewardScorer
        from actor.rewards.types import Response
        from actor.rewards.verifier_pool import VerifierPool

        async def seconds() -> float:
            rewards, asked = (
                RewardScorer(VerifierPool.of_config(self._config, num_workers=1)),
                msgspec.convert(task, Task),
            )
            # The answer format of verifier=math.
            response = Response(text=f"\\boxed{{{asked.answer}}}", finish="stop", num_tokens=8)
            try:
                await rewards.score(response, asked)
                start = time.perf_counter()
                await rewards.score(response, asked)
                return time.perf_counter() - start
            finally:
                await rewards.close()

        return {"verifier_s": self._runner.run(seconds())}

    def close(self) -> None:
        """Closes the engine and its resources."""
        self._runner.run(self._engine.close())
        self._runner.close()
        self._weights.close()
        self._copy.close()
        self._timeline.close()


def with_size(config: Config, tensor_parallel_size: int) -> Config:
    """Returns the config with one engine of this size; the workers of a larger one have separate cores on a CPU."""
    actor = dataclasses.replace(config.actor, tensor_parallel_size=tensor_parallel_size)
    cores = config.actor.cpu_cores.replace("|", ",") or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return of_one_engine(dataclasses.replace(config, actor=actor), cores if tensor_parallel_size > 1 else None)


def main() -> None:
    """Answers requests until there are no more."""
    wanted = "learner|engine RUN_FOLDER TENSOR_PARALLEL_SIZE"
    given = process_tree.arguments(sys.argv, wanted, command="launch.tools.profile_machine")
    parent = RpcServer()
    cli.log_to_stderr()
    role, folder, size = given
    side = None
    try:
        prepared = prepare_run.open_prepared(folder)
        config = with_size(prepared.config, int(size))
        side = {"learner": LearnerSide, "engine": EngineSide}[role](config, prepared)
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
