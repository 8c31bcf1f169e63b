"""Verifier workers: off the event loop, with a deadline, killed and started again when they hang.

What goes wrong here is the infrastructure's fault, unless somebody shows otherwise: it is tried again, then reported as
a `VerifierError`. It never becomes a reward.
"""

import asyncio
import contextlib
import math
import os
import pathlib
import random
import signal
import struct
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
from absl import logging

from actor.verifiers import worker
from actor.verifiers.judged import Context, Response, Score
from actor.verifiers.worker import Answer, Question
from bridge.secrets import without_secrets
from bridge.types import Task
from configs import extension
from configs.sections import RewardsConfig

LOAD_TIMEOUT_S = 120.0
"""For starting a worker and importing a verifier's library; the deadline proper begins after that."""
MAX_HANGS = 3
"""A verifier that hangs on a text is asked about it so many times; failures of another kind have `retries`."""
TIMES_CASES = ("code",)
"""Verifiers that run test cases and end them themselves, after `rewards.max_answer_s` at the latest."""
BEFORE_CASES_S = 120.0
"""For those: until a sandbox is there and the program compiled; then `rewards.max_answer_s` begins."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0
"""Before the next attempt, doubled each time: what a machine lacks for a moment is there again."""
END_S = 1.0
"""A worker that closed its output ends within this, or it is killed."""
_DEFAULTS = RewardsConfig()
COMMAND = (sys.executable, "-P", "-m", worker.__name__)


class VerifierError(RuntimeError):
    """A response could not be judged."""


class HangError(VerifierError):
    """A verifier hung on a response, each time that it was asked (`MAX_HANGS`)."""


class RaisedError(VerifierError):
    """A verifier raised of what it was asked, each time: a worker or a sandbox that broke is another matter."""


class VerifierPool:
    """A number of worker processes, each with one response at a time."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        retries: int,
        settings: RewardsConfig = _DEFAULTS,
        command: Sequence[str] = COMMAND,
        own: Collection[str] = (),
        cores: Collection[int] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Workers are started when they are first needed.

        Args:
          num_workers: processes, and responses judged at once.
          timeout_s: for one response, but for the time that its own code may take.
          retries: of what failed.
          settings: what verifiers are told.
          command: of a worker.
          own: the user's own verifiers that may be asked for: a ticket's name alone makes nothing be imported.
          cores: that the workers run on; none: as this process.
          sleep: between attempts; it holds no worker meanwhile.
          draw: how long, between half of what it may be and all.

        Raises:
          ValueError: this machine has no such core.
        """
        check_cores(cores)
        self._sleep, self._draw = sleep, draw
        self._own = own
        self._timeout_s, self._retries, self.settings = timeout_s, retries, settings
        command = (*command, *(["--cores=" + ",".join(map(str, sorted(cores)))] if cores else []))
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker(command) for _ in range(num_workers)]
        for w in self._workers:
            self._idle.put_nowait(w)
        self.num_failures = 0
        """Attempts that failed, whether or not a later one succeeded."""

    async def score(
        self,
        name: str,
        response: Response,
        task: Task,
        *,
        case_timeouts_s: Callable[[], tuple[float, ...]] = tuple,
    ) -> Score:
        """What a verifier gives a response.

        Args:
          name: the verifier's.
          response: to judge.
          task: that it answers.
          case_timeouts_s: gives what `Context` has, asked when a worker is free.

        Raises:
          HangError: it hung on it `MAX_HANGS` times.
          VerifierError: it failed more often than `retries`, or gave no finite number.
        """
        self._check_allowed(name)
        num_hangs = num_failures = 0
        while True:
            one = await self._idle.get()
            context = Context(settings=self.settings, case_timeouts_s=case_timeouts_s())
            try:
                return await self._attempt(one, Question(verifier=name, task=task, response=response, context=context))
            except VerifierError as e:
                self.num_failures += 1
                logging.warning("verifier failed verifier=%s problem=%r", name, str(e))
                num_hangs += isinstance(e, HangError)
                num_failures += not isinstance(e, HangError)
                if num_hangs == MAX_HANGS:
                    raise HangError(f"verifier {name}: {e} ({num_hangs} times)") from e
                if num_failures > self._retries:
                    raise type(e)(f"verifier {name}: {e} ({num_failures} attempts)") from e
            finally:
                self._idle.put_nowait(one)
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_hangs + num_failures - 1, 60))
            await self._sleep(self._draw(pause_s / 2, pause_s))

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
            await self._load(one, name)
        finally:
            self._idle.put_nowait(one)

    async def close(self) -> None:
        """Ends the workers."""
        for w in self._workers:
            await w.kill()

    async def _attempt(self, one: "_Worker", question: Question) -> Score:
        try:
            await self._load(one, question.verifier)
            own_s = BEFORE_CASES_S + self.settings.max_answer_s if question.verifier in TIMES_CASES else 0.0
            score = await self._ask(one, question, self._timeout_s + own_s)
        except asyncio.CancelledError:
            await one.kill()  # its next answer would be to a question nobody asks any more
            raise
        if score is None or not math.isfinite(score.value):
            raise VerifierError(f"the score is {score}")
        return score

    async def _load(self, one: "_Worker", name: str) -> None:
        if name in one.loaded:
            return
        try:
            await self._ask(one, Question(verifier=name, context=Context(settings=self.settings)), LOAD_TIMEOUT_S)
        except HangError as e:  # no text was asked about
            raise VerifierError(f"loading it: {e}") from e
        one.loaded.add(name)

    async def _ask(self, one: "_Worker", question: Question, timeout_s: float) -> Score | None:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await one.ask(question)
        except TimeoutError as e:
            is_stopped = one.is_stopped
            await one.kill()
            if is_stopped:  # by a signal: no answer can do that to the process that judges it
                raise VerifierError(f"the worker was stopped and gave no answer within {timeout_s} s") from e
            raise HangError(f"no answer after {timeout_s} s") from e
        except (asyncio.IncompleteReadError, OSError, struct.error, msgspec.MsgspecError, ValueError) as e:
            ended = await one.ended()
            await one.kill()
            raise VerifierError(f"the worker broke down{ended}: {type(e).__name__}: {e}") from e
        if answer.error:
            raise (VerifierError if answer.is_machines else RaisedError)(answer.error)
        return answer.score


def check_cores(cores: Collection[int]) -> None:
    """Whether this machine has the cores that verifiers are to run on.

    Raises:
      ValueError: it hasn't.
    """
    num_cores = os.cpu_count() or 1
    if missing := sorted(set(cores) - set(range(num_cores))):
        raise ValueError(f"rewards.cpu_cores names {missing}, this machine has cores 0 to {num_cores - 1}")


def check_own(names: Collection[str]) -> None:
    """Loads a user's own verifiers in a worker, before anything starts.

    Raises:
      ValueError: says why one can't be.
    """
    if not names:
        return

    async def load() -> None:
        pool = VerifierPool(num_workers=1, timeout_s=LOAD_TIMEOUT_S, retries=0, own=names)
        try:
            for name in names:
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

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped it, or a debugger (Linux; unknown elsewhere)."""
        if self._process is None:
            return False
        try:
            stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    async def ended(self) -> str:
        """How the process ended, if it has, or is about to: for a message."""
        if self._process is None:
            return ""
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:
            return ""
        return f" by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f" with exit code {code}"

    async def kill(self) -> None:
        process, self._process = self._process, None
        self.loaded.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
