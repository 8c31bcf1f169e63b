"""Verifier workers: outside the event loop, with timeouts, killed and restarted when they hang.

Failures count as infrastructure failures unless a caller shows otherwise: they are retried, then raised as
`VerifierError`, and never become a reward.
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
"""Timeout for starting a worker and importing a verifier, in seconds; scoring timeouts start afterwards."""
RETRIES = 2
"""Retries of a failed verifier call, with an increasing pause before each."""
MAX_HANGS = 3
"""Maximum hangs of a verifier on one text; other failures have `retries`."""
TIMES_CASES = ("code",)
"""Verifiers that run test cases under their own timeouts, at most `rewards.max_answer_s`."""
BEFORE_CASES_S, MAX_ANSWERS = 120.0, 10
"""Timeout of test-case verifiers: BEFORE_CASES_S seconds for sandbox and compilation, plus MAX_ANSWERS times
`rewards.max_answer_s`, which counts CPU time and not the wall time on a busy machine."""
TRIAL_S = 60.0
"""Timeout for a custom verifier's trial call before a run, in seconds."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0
"""First and longest pause before a retry, in seconds; doubled each time, so that a short resource shortage passes."""
_BUGS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
"""Exceptions that a buggy function raises on any input."""
_DEFAULTS = RewardsConfig()
COMMAND = (sys.executable, "-P", "-m", verifier_worker.__name__)


class VerifierError(RuntimeError):
    """A response could not be scored."""


class HangError(VerifierError):
    """A verifier hung on a response `MAX_HANGS` times."""


class RaisedError(VerifierError):
    """A verifier raised an exception on each attempt, while worker and sandbox worked."""


class NotANumberError(RaisedError):
    """A custom verifier returned a value that no response could turn into a number."""


class VerifierPool:
    """Pool of worker processes that score one response each at a time."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        retries: int = RETRIES,
        settings: RewardsConfig = _DEFAULTS,
        command: Sequence[str] = COMMAND,
        own: Collection[str] = (),
        cores: Collection[int] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`timeout_s` applies per response, in addition to the time that its program may use.

        `own` lists the custom verifiers that may be imported: a ticket's name alone imports nothing. Empty `cores` mean
        those of this process. `draw` returns a pause between half and all of its maximum. Raises ValueError if this
        machine lacks one of the cores.
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
        """Failed attempts, including those that a retry followed successfully."""

    @classmethod
    def of_config(
        cls,
        config: Config,
        *,
        num_workers: int | None = None,
        own: Collection[str] | None = None,
        cores: Collection[int] = (),
    ) -> "VerifierPool":
        """Returns a run's pool; None means `actor.verifier_workers` processes and the config's custom verifiers."""
        return cls(
            num_workers=config.actor.verifier_workers if num_workers is None else num_workers,
            timeout_s=config.actor.verifier_timeout_s,
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
        """Returns a verifier's score of a response.

        `case_timeouts_s` returns `Context.case_timeouts_s`. It is called when a worker is free and again while it
        scores, so that timeouts follow the siblings' runs. Raises HangError if the verifier hung `MAX_HANGS` times, and
        VerifierError if it failed more than `retries` times, or returned no finite number.
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
            raise VerifierError(f"verifier {name} is custom code that this actor must not import")

    async def load(self, name: str) -> None:
        """Loads a verifier in a worker. Raises VerifierError if loading failed."""
        self._check_allowed(name)
        async with self._worker() as one:
            await self._load(one, name)

    async def try_own(self, name: str, task: Task, response: Response) -> None:
        """Calls a custom verifier once.

        Raises NotANumberError if no response could turn what it returned into a number, RaisedError if it raised or
        returned a non-finite number, and VerifierError if its process exited or did not answer.
        """
        self._check_allowed(name)
        question = ScoreRequest(verifier=name, task=task, response=response, context=Context(settings=self.settings))
        async with self._worker() as one:
            await self._load(one, name)
            await self._ask(one, question, TRIAL_S)

    async def close(self) -> None:
        """Stops the workers."""
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
            await one.kill()  # otherwise its next answer would belong to the cancelled question
            raise
        if score is None or not math.isfinite(score.value):
            raise VerifierError(f"expected a finite score, got {score}")
        return score

    async def _load(self, one: WorkerProcess, name: str) -> None:
        if name in one.loaded:
            return
        try:
            await self._ask(one, ScoreRequest(verifier=name, context=Context(settings=self.settings)), LOAD_TIMEOUT_S)
        except HangError as e:  # no response was involved
            raise VerifierError(f"loading failed: {e}") from e
        one.loaded.add(name)

    async def _ask(self, one: WorkerProcess, question: ScoreRequest, timeout_s: float) -> Score | None:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await one.ask(question)
        except TimeoutError as e:
            is_stopped = one.is_stopped
            await one.kill()
            if is_stopped:  # suspended by a signal, which no response can do to its verifier
                raise VerifierError(f"the worker was suspended and gave no answer within {timeout_s} s") from e
            raise HangError(f"no answer after {timeout_s} s") from e
        except (asyncio.IncompleteReadError, OSError, struct.error, msgspec.MsgspecError, ValueError) as e:
            ended = await one.ended()
            await one.kill()
            raise VerifierError(f"the worker crashed{ended}: {type(e).__name__}: {e}") from e
        if answer.error:
            kind = VerifierError if answer.is_machines else NotANumberError if answer.is_no_number else RaisedError
            raise kind(answer.error)
        return answer.score


def check_cores(cores: Collection[int]) -> None:
    """Raises ValueError if this machine lacks one of the cores."""
    num_cores = os.cpu_count() or 1
    if missing := sorted(set(cores) - set(range(num_cores))):
        raise ValueError(f"rewards.cpu_cores: expected cores 0 to {num_cores - 1} of this machine, got {missing}")


def check_own(names: Collection[str], task: Task | None = None) -> list[str]:
    """Loads custom verifiers in a worker at startup and calls each once, on the reference answer of `task`.

    Without a task it is a made-up one, on which a verifier that needs row data may raise; returns a line for each such
    exception. Raises ValueError if a verifier cannot be used.
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
        said = " ".join(f"prompts.verifier={name}: failed on a trial response: {e}".split())
        if task or isinstance(e, NotANumberError) or str(e).startswith(_BUGS):
            raise ValueError(said) from e
        return f"{said} (tested without a row of the run; in a run the score is retried, then the group is dropped)"
    except VerifierError as e:
        raise ValueError(" ".join(f"prompts.verifier={name}: failed on a trial response: {e}".split())) from e
    return ""
