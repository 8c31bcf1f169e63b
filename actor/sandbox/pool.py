"""Pool of sandboxes started ahead, one program per sandbox."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from absl import logging

from actor.sandbox.bwrap import HARNESS, HostView
from actor.sandbox.process import SandboxCrashError, SandboxExhaustedError, SandboxProcess
from actor.sandbox.program import Case, CompileError, LanguageError, Outcome, Program, SandboxError, SandboxLimits

MAX_STARTS = 3
"""Maximum consecutive failed starts, or sandboxes that break before they have a program or under one case."""
WAIT_S = 60.0
"""Wait for a sandbox while others are being started, in seconds."""


class Sandbox:
    """Runner of programs, each in its own sandbox; thread-safe.

    One internal thread starts sandboxes and keeps `num_warm` waiting. Sandboxes die with the thread that started them,
    so it cannot be a caller's thread.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, num_warm: int = 2, view: HostView | None = None) -> None:
        """Starts the internal thread. Raises ValueError if `num_warm` is below 1."""
        if num_warm < 1:
            raise ValueError(f"num_warm must be >= 1, got {num_warm}")
        self.limits = limits or SandboxLimits()
        self._view = view or HostView()
        self._num_warm = num_warm
        self._changed = threading.Condition()
        self._warm: collections.deque[SandboxProcess] = collections.deque()
        self._waste: list[SandboxProcess] = []
        self._num_failed = 0
        self._problem = ""
        self._is_closed = False
        self.num_started = 0
        self.num_broken = 0
        """Sandboxes that did not start, or broke."""
        self._keeper = threading.Thread(target=self._keep_warm, name="sandboxes", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops all sandboxes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._keeper.join()

    @contextlib.contextmanager
    def open(self, program: Program) -> Iterator["SandboxHandle"]:
        """Yields a sandbox with the compiled program; remaining processes are killed on exit.

        Raises LanguageError if the sandbox lacks the compiler or interpreter, SandboxError if no sandbox was available,
        CompileError if the program does not compile, and ValueError if it is larger than a sandbox's disk.
        """
        size = sum(map(len, program.files.values()))
        if size > self.limits.disk_bytes:
            raise ValueError(
                f"program: expected at most {self.limits.disk_bytes} bytes (SandboxLimits.disk_bytes), got {size}"
            )
        box = SandboxHandle(self, program)
        try:
            box._run()
            yield box
        finally:
            box._end()

    def run(self, program: Program, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Yields the outcome of each case, run on demand; raises the errors of `open` and of `SandboxHandle.run`."""
        with self.open(program) as box:
            for case in cases:
                yield box.run(case)

    def tools(self) -> frozenset[str]:
        """Returns the compilers and interpreters that sandboxes find; raises SandboxError as `open` does."""
        process = self._take()
        self._give_back(process)
        return process.tools

    def _hand_over(self, program: Program) -> SandboxProcess:
        problem = ""
        for _ in range(MAX_STARTS):
            process = self._take()
            missing = [tool for tool in program.tools if tool not in process.tools]
            try:
                if missing:
                    raise LanguageError(
                        f"the sandbox lacks {', '.join(missing)}; install it under /usr, or do not use this language"
                    )
                process.hand_over(program)
                return process
            except LanguageError:
                self._give_back(process)
                raise
            except SandboxCrashError as e:
                problem = str(e)
                self._count_broken(problem)
                self._discard(process)
        raise SandboxError(f"{MAX_STARTS} sandboxes failed before they received the program: {problem}")

    def _give_back(self, process: SandboxProcess) -> None:
        with self._changed:
            self._warm.appendleft(process)
            self._changed.notify_all()

    def _take(self) -> SandboxProcess:
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._warm or self._num_failed >= MAX_STARTS or self._is_closed, deadline - time.monotonic()
                )
                if self._is_closed:
                    raise SandboxError("the pool of sandboxes is closed")
                if not self._warm:
                    raise SandboxError(
                        f"no sandbox available: {self._problem or f'none started within {WAIT_S:.0f} s'}"
                    )
                process = self._warm.popleft()
                self._changed.notify_all()
            if process.is_alive:
                return process
            self._count_broken("an idle sandbox exited")
            self._discard(process)

    def _count_broken(self, problem: str) -> None:
        logging.warning("sandbox broke problem=%r", problem)
        with self._changed:
            self.num_broken += 1

    def _discard(self, process: SandboxProcess) -> None:
        """Queues a sandbox to be closed by the internal thread; no case runs in it any more."""
        with self._changed:
            self._waste.append(process)
            self._changed.notify_all()

    def _keep_warm(self) -> None:
        pause_s = 0.0
        while True:
            with self._changed:
                if pause_s:
                    self._changed.wait_for(lambda: self._is_closed, pause_s)
                self._changed.wait_for(lambda: self._is_closed or self._waste or len(self._warm) < self._num_warm)
                waste, self._waste = self._waste, []
                is_closed = self._is_closed
                if is_closed:
                    waste += self._warm
                    self._warm.clear()
            for process in waste:
                process.close()
            if is_closed:
                return
            if len(self._warm) < self._num_warm:
                pause_s = self._start_one()

    def _start_one(self) -> float:
        """Starts one sandbox; returns the seconds until the next attempt, 0 after success."""
        try:
            process = SandboxProcess(self.limits, self._view)
            try:
                process.wait_ready()
            except SandboxCrashError:
                process.close()
                raise
        except (OSError, ValueError, SandboxCrashError) as e:
            with self._changed:
                self._num_failed += 1
                self.num_broken += 1
                self._problem = str(e)
                self._changed.notify_all()
                logging.warning("sandbox start failed failures=%d problem=%r", self._num_failed, self._problem)
                return min(5.0, 0.05 * 2.0 ** min(self._num_failed, 10))
        with self._changed:
            self._num_failed = 0
            self.num_started += 1
            self._warm.append(process)
            self._changed.notify_all()
        return 0.0


class SandboxHandle:
    """Program in its sandbox; cases run one at a time, each in a fresh state. For one thread."""

    def __init__(self, sandbox: Sandbox, program: Program) -> None:
        self._sandbox = sandbox
        self._program = program
        self._process: SandboxProcess | None = None

    def run(self, case: Case, *, timeout_s: Callable[[], float] | None = None) -> Outcome:
        """Runs one case; on return all its processes are dead.

        `timeout_s` returns the case's current timeout while it runs. A sandbox that dies or does not begin the case is
        the machine's fault: the case is retried in another sandbox. Raises SandboxError if none was available, or
        `MAX_STARTS` sandboxes broke, and ValueError if only one of case and program is for a call.
        """
        if (case.call is not None) != (HARNESS in self._program.argv):
            raise ValueError(
                "a case with a call and a program of languages.program(..., calls=True) require each other"
            )
        outcome = self._run(case, timeout_s)
        assert outcome is not None
        return outcome

    def _run(self, case: Case | None = None, timeout_s: Callable[[], float] | None = None) -> Outcome | None:
        problem = ""
        for _ in range(MAX_STARTS):
            try:
                process = self._process or self._begin()
                outcome = process.run(self._program, self._program.argv, case, timeout_s=timeout_s) if case else None
            except SandboxExhaustedError as e:
                # Leftovers of an earlier case are not this case's fault: use a fresh sandbox.
                problem = str(e)
                logging.info("sandbox exhausted problem=%r", problem)
                self._end()
            except SandboxCrashError as e:
                problem = str(e)
                self._sandbox._count_broken(problem)
                self._end()
            else:
                if not process.is_alive:
                    self._end()
                return outcome
        raise SandboxError(f"{MAX_STARTS} sandboxes failed while they ran a case: {problem}")

    def _begin(self) -> SandboxProcess:
        self._process = process = self._sandbox._hand_over(self._program)
        if self._program.compile_argv:
            compiling = Case(timeout_s=self._sandbox.limits.compile_timeout_s)
            outcome = process.run(self._program, self._program.compile_argv, compiling, keeps=True)
            if not outcome.succeeded:
                raise CompileError(outcome)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._sandbox._discard(self._process)
            self._process = None
