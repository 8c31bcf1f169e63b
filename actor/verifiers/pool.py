"""Verifier workers: off the event loop, with a deadline, killed and started again when they hang.

What goes wrong here is the infrastructure's fault, never the response's: it is tried again, then
reported as a `VerifierError`. It never becomes a reward.
"""

import asyncio
import contextlib
import math
import os
import struct
import sys
from collections.abc import Collection, Sequence

import msgspec
from absl import logging

from actor.verifiers import worker
from actor.verifiers.worker import Answer, Question
from bridge.secrets import without_secrets
from bridge.types import Finish, Task
from configs import extension
from configs.sections.prompts import Truncated

LOAD_TIMEOUT_S = 120.0
"""For starting a worker and importing a verifier's library; the deadline proper begins after that."""
TRUNCATED_REWARD = 0.0
"""Of a response that the token limit cut off, with prompts.truncated=zero (PipelineRL section 5)."""
COMMAND = (sys.executable, "-P", "-m", worker.__name__)


class VerifierError(RuntimeError):
    """A response could not be judged."""


class VerifierPool:
    """A number of worker processes, each with one response at a time."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        retries: int,
        truncated: Truncated = "zero",
        command: Sequence[str] = COMMAND,
        own: Collection[str] = (),
    ) -> None:
        """Workers are started when they are first needed; `truncated` is `prompts.truncated`.

        Of the user's own verifiers only `own` may be asked for: a ticket's name alone makes nothing be imported.
        """
        self._own = own
        self._timeout_s = timeout_s
        self._truncated: Truncated = truncated
        self._retries = retries
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker(command) for _ in range(num_workers)]
        for w in self._workers:
            self._idle.put_nowait(w)
        self.num_failures = 0
        """Attempts that failed, whether or not a later one succeeded."""

    async def score(self, response_text: str, task: Task, finish: Finish) -> float:
        """The reward of a response that ended by `finish`; a truncated one is judged unless truncated=zero.

        Raises:
          VerifierError: every attempt failed, hung or gave no finite number.
        """
        if finish == "length" and self._truncated == "zero":
            return TRUNCATED_REWARD
        self._check_allowed(task.verifier)
        problem = ""
        for _ in range(1 + self._retries):
            one = await self._idle.get()
            try:
                return await self._attempt(one, Question(task=task, response_text=response_text, finish=finish))
            except VerifierError as e:
                problem = str(e)
                self.num_failures += 1
                logging.warning("verifier failed verifier=%s problem=%r", task.verifier, problem)
            finally:
                self._idle.put_nowait(one)
        raise VerifierError(f"verifier {task.verifier}: {problem} ({1 + self._retries} attempts)")

    def _check_allowed(self, name: str) -> None:
        if extension.is_own(name) and name not in self._own:
            raise VerifierError(f"verifier {name} is code of somebody's own that this actor may not import")

    async def load(self, name: str) -> None:
        """Lets a worker load a verifier, as the first response to judge will.

        Raises:
          VerifierError: says why it can't be.
        """
        self._check_allowed(name)
        one = await self._idle.get()
        try:
            await self._load(one, Task(verifier=name, answer=""))
        finally:
            self._idle.put_nowait(one)

    async def close(self) -> None:
        """Ends the workers."""
        for w in self._workers:
            await w.kill()

    async def _attempt(self, one: "_Worker", question: Question) -> float:
        try:
            await self._load(one, question.task)
            reward = await self._ask(one, question, self._timeout_s)
        except asyncio.CancelledError:
            await one.kill()  # its next answer would be to a question nobody asks any more
            raise
        if reward is None or not math.isfinite(reward):
            raise VerifierError(f"the reward is {reward}")
        return reward

    async def _load(self, one: "_Worker", task: Task) -> None:
        if task.verifier not in one.loaded:
            await self._ask(one, Question(task=task, response_text=None), LOAD_TIMEOUT_S)
            one.loaded.add(task.verifier)

    async def _ask(self, one: "_Worker", question: Question, timeout_s: float) -> float | None:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await one.ask(question)
        except TimeoutError as e:
            await one.kill()
            raise VerifierError(f"no answer after {timeout_s} s") from e
        except (asyncio.IncompleteReadError, OSError, struct.error, msgspec.MsgspecError, ValueError) as e:
            await one.kill()
            raise VerifierError(f"the worker broke down: {type(e).__name__}: {e}") from e
        if answer.error:
            raise VerifierError(answer.error)
        return answer.reward


def check_own(name: str) -> None:
    """Loads a user's own verifier in a worker, before anything starts; names of ours need no check.

    Raises:
      ValueError: says why it can't be.
    """
    if not extension.is_own(name):
        return

    async def load() -> None:
        pool = VerifierPool(num_workers=1, timeout_s=LOAD_TIMEOUT_S, retries=0, own=(name,))
        try:
            await pool.load(name)
        finally:
            await pool.close()

    try:
        asyncio.run(load())
    except VerifierError as e:
        raise ValueError(str(e).removeprefix("ValueError: ")) from e


class _Worker:
    """One process; started by its first question, and again after each kill."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self.loaded: set[str] = set()

    async def ask(self, question: Question) -> Answer:
        if self._process is None or self._process.returncode is not None:
            await self.kill()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # One thread each: the cores are the engine's.
                env={
                    **without_secrets(os.environ),  # a verifier may be anybody's code
                    "PYTHONPATH": extension.python_path(),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(worker.frame(question))
        await stdin.drain()
        length = worker.frame_length(await stdout.readexactly(4))
        return msgspec.msgpack.decode(await stdout.readexactly(length), type=Answer)

    async def kill(self) -> None:
        process, self._process = self._process, None
        self.loaded.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
