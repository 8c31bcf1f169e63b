"""Verifier workers: off the event loop, with a deadline, killed and started again when they hang.

What goes wrong here is the infrastructure's fault, unless somebody shows otherwise: it is tried again, then reported as
a `VerifierError`. It never becomes a reward.
"""

import asyncio
import contextlib
import math
import os
import random
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

import msgspec
from absl import logging

from actor.rewards import verifier_worker
from actor.rewards.types import Context, Response, Score
from actor.rewards.verifier_process import WorkerProcess
from actor.rewards.verifier_worker import ScoreRequest
from bridge.rollout_types import Task
from configs import custom_functions
from configs.schema import Config
from configs.sections import RewardsConfig

LOAD_TIMEOUT_S = 120.0
"""For starting a worker and importing a verifier's library; the deadline proper begins after that."""
MAX_HANGS = 3
"""A verifier that hangs on a text is asked about it so many times; failures of another kind have `retries`."""
TIMES_CASES = ("code",)
"""Verifiers that run test cases and end them themselves, after `rewards.max_answer_s` at the latest."""
BEFORE_CASES_S, MAX_ANSWERS = 120.0, 10
"""Deadline of those: seconds until a sandbox is there and the program compiled, then so many times
`rewards.max_answer_s`, which counts the time that a program uses and not how long that takes on a busy machine."""
TRIAL_S = 60.0
"""Deadline of the one call of a user's own verifier before a run starts."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0
"""Before the next attempt, doubled each time: what a machine lacks for a moment is there again."""
_BUGS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
"""Exceptions that a function raises whatever it is asked."""
_DEFAULTS = RewardsConfig()
COMMAND = (sys.executable, "-P", "-m", verifier_worker.__name__)


class VerifierError(RuntimeError):
    """A response could not be judged."""


class HangError(VerifierError):
    """A verifier hung on a response, each time that it was asked (`MAX_HANGS`)."""


class RaisedError(VerifierError):
    """A verifier raised of what it was asked, each time: a worker or a sandbox that broke is another matter."""


class NotANumberError(RaisedError):
    """A user's own verifier returned something that no response makes a number."""


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
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._workers = [WorkerProcess(command) for _ in range(num_workers)]
        for w in self._workers:
            self._idle.put_nowait(w)
        self.num_failures = 0
        """Attempts that failed, whether or not a later one succeeded."""

    @classmethod
    def of_config(
        cls,
        config: Config,
        *,
        num_workers: int | None = None,
        own: Collection[str] | None = None,
        cores: Collection[int] = (),
    ) -> "VerifierPool":
        """Returns a run's pool; None: `actor.verifier_workers` processes, and the config's own verifiers."""
        return cls(
            num_workers=config.actor.verifier_workers if num_workers is None else num_workers,
            timeout_s=config.actor.verifier_timeout_s,
            retries=config.actor.verifier_retries,
            settings=config.rewards,
            own=config.custom_verifiers if own is None else own,
            cores=cores,
        )

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
          case_timeouts_s: gives what `Context` has, asked when a worker is free and again while it judges: a deadline
            follows what siblings took.

        Raises:
          HangError: it hung on it `MAX_HANGS` times.
          VerifierError: it failed more often than `retries`, or gave no finite number.
        """
        self._check_allowed(name)
        num_hangs = num_failures = 0
        while True:
            try:
                async with self._worker() as one:
                    context = Context(settings=self.settings, case_timeouts_s=case_timeouts_s())
                    one.timeouts_s = case_timeouts_s if name in TIMES_CASES else None
                    question = ScoreRequest(verifier=name, task=task, response=response, context=context)
                    return await self._attempt(one, question)
            except VerifierError as e:
                self.num_failures += 1
                logging.warning("verifier failed verifier=%s problem=%r", name, str(e))
                num_hangs += isinstance(e, HangError)
                num_failures += not isinstance(e, HangError)
                if num_hangs == MAX_HANGS:
                    raise HangError(f"verifier {name}: {e} ({num_hangs} times)") from e
                if num_failures > self._retries:
                    raise type(e)(f"verifier {name}: {e} ({num_failures} attempts)") from e
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_hangs + num_failures - 1, 60))
            await self._sleep(self._draw(pause_s / 2, pause_s))

    def _check_allowed(self, name: str) -> None:
        if custom_functions.is_custom(name) and name not in self._own:
            raise VerifierError(f"verifier {name} is code of somebody's own that this actor may not import")

    async def load(self, name: str) -> None:
        """Lets a worker load a verifier, as the first response to judge will.

        Raises:
          VerifierError: says why it can't be.
        """
        self._check_allowed(name)
        async with self._worker() as one:
            await self._load(one, name)

    async def try_own(self, name: str, task: Task, response: Response) -> None:
        """Calls a user's own verifier once.

        Raises:
          NotANumberError: it returned what no response makes a number.
          RaisedError: it raised, or returned a number that is not finite.
          VerifierError: it ended its process, or gave no answer.
        """
        self._check_allowed(name)
        question = ScoreRequest(verifier=name, task=task, response=response, context=Context(settings=self.settings))
        async with self._worker() as one:
            await self._load(one, name)
            await self._ask(one, question, TRIAL_S)

    async def close(self) -> None:
        """Ends the workers."""
        await asyncio.gather(*(w.kill() for w in self._workers))

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        one = await self._idle.get()
        try:
            yield one
        finally:
            self._idle.put_nowait(one)

    async def _attempt(self, one: WorkerProcess, question: ScoreRequest) -> Score:
        try:
            await self._load(one, question.verifier)
            is_timed = question.verifier in TIMES_CASES
            own_s = BEFORE_CASES_S + MAX_ANSWERS * self.settings.max_answer_s if is_timed else 0.0
            score = await self._ask(one, question, self._timeout_s + own_s)
        except asyncio.CancelledError:
            await one.kill()  # its next answer would be to a question nobody asks any more
            raise
        if score is None or not math.isfinite(score.value):
            raise VerifierError(f"the score is {score}")
        return score

    async def _load(self, one: WorkerProcess, name: str) -> None:
        if name in one.loaded:
            return
        try:
            await self._ask(one, ScoreRequest(verifier=name, context=Context(settings=self.settings)), LOAD_TIMEOUT_S)
        except HangError as e:  # no text was asked about
            raise VerifierError(f"loading it: {e}") from e
        one.loaded.add(name)

    async def _ask(self, one: WorkerProcess, question: ScoreRequest, timeout_s: float) -> Score | None:
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
            kind = VerifierError if answer.is_machines else NotANumberError if answer.is_no_number else RaisedError
            raise kind(answer.error)
        return answer.score


def check_cores(cores: Collection[int]) -> None:
    """Whether this machine has the cores that verifiers are to run on.

    Raises:
      ValueError: it hasn't.
    """
    num_cores = os.cpu_count() or 1
    if missing := sorted(set(cores) - set(range(num_cores))):
        raise ValueError(f"rewards.cpu_cores names {missing}, this machine has cores 0 to {num_cores - 1}")


def check_own(names: Collection[str], task: Task | None = None) -> list[str]:
    """Loads a user's own verifiers in a worker and calls each once, before anything starts.

    Args:
      names: the verifiers.
      task: a task of the run, whose own answer they are asked about; None: one that was made up. Of that a verifier may
        raise that needs what rows have.

    Returns:
      One line for each that raised something that may be the made-up task's fault.

    Raises:
      ValueError: says why one can't be used.
    """
    if not names:
        return []

    async def load() -> list[str]:
        pool = VerifierPool(num_workers=1, timeout_s=LOAD_TIMEOUT_S, retries=0, own=names)
        try:
            return [line for name in names if (line := await _trial(pool, name, task))]
        finally:
            await pool.close()

    try:
        return asyncio.run(load())
    except VerifierError as e:
        raise ValueError(str(e).removeprefix("ValueError: ")) from e


async def _trial(pool: VerifierPool, name: str, task: Task | None) -> str:
    await pool.load(name)
    asked = task or Task.judged_by(name, answer="42", metadata="{}")
    try:
        await pool.try_own(name, asked, Response(text=asked.answer or "42", finish="stop", num_tokens=1))
    except RaisedError as e:
        said = " ".join(f"prompts.verifier={name}: called once, on a trial response: {e}".split())
        if task or isinstance(e, NotANumberError) or str(e).startswith(_BUGS):
            raise ValueError(said) from e
        return f"{said} (no row of the run was at hand; at a response this is retried, then its group dropped)"
    except VerifierError as e:
        raise ValueError(" ".join(f"prompts.verifier={name}: called once, on a trial response: {e}".split())) from e
    return ""
