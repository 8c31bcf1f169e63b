"""Supervised process: start, log, state, kill, and last error line."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from bridge.liveness import FD_VARIABLE, Activity, Liveness, read_phase
from configs import custom_functions
from launch.supervision.hang_detector import HangDetector, HangTimeouts
from launch.supervision.process_tree import EXIT_S, kill_leftovers
from launch.supervision.process_tree import environment as lifeline

_MAX_BYTES = 1 << 20
"""Maximum bytes parsed per read; only the end of a longer piece is parsed."""


class PhaseLog:
    """Reader of the latest phase in a growing log, beginning at the log's current end."""

    def __init__(self, log: pathlib.Path) -> None:
        """Skips existing content, which is from an earlier process; the log may not exist yet."""
        self._log, self._rest, self._phase = log, b"", ""
        try:
            self._offset = log.stat().st_size
        except FileNotFoundError:
            self._offset = 0

    def phase(self) -> str:
        """Returns the phase that the process last reported; empty if none."""
        try:
            size = self._log.stat().st_size
            if size != self._offset:
                self._read(size)
        except OSError:  # the log does not exist yet or its disk fails: keep the last phase
            pass
        return self._phase

    def _read(self, size: int) -> None:
        if size < self._offset:  # the log was truncated
            self._offset, self._rest = 0, b""
        with open(self._log, "rb") as file:
            file.seek(max(self._offset, size - _MAX_BYTES))
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            said = read_phase(line.decode(errors="replace"))
            self._phase = self._phase if said is None else said


_LOOK_S = 0.05
SAID = {Activity.STARTING: "starting", Activity.WAITING: "waiting", Activity.NO_ACTORS: "waiting, no live actor"}


class Child:
    """A role of the run: its current process, replaced by restarts, and its log.

    The supervisor sends it no messages: results are in the run folder, and it reports its liveness (`bridge.liveness`).
    """

    def __init__(
        self,
        role: str,
        arguments: list[str],
        log: pathlib.Path,
        *,
        devices: str,
        environment: Mapping[str, str] = {},
        mark: str = "",
        bounds: HangTimeouts,
    ) -> None:
        """Prepares the role without starting a process.

        `role` is "learner" (several processes: "learner-1", ...), or "actor-0", "actor-1", ... `devices` is
        CUDA_VISIBLE_DEVICES; empty leaves it unset. `mark` identifies the process and its children; empty disables the
        search for leftovers.
        """
        self.role = role
        self.num_restarts = 0
        self.num_restarts_in_a_row = 0
        """Restarts since the run last made progress."""
        self.hung = ""
        """Evidence that the previous or killed process hung; empty if it did not."""
        self._arguments = arguments
        self._log = log
        self._environment = dict(environment) | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})
        self._mark, self._bounds = mark, bounds
        self._process: subprocess.Popen[bytes] | None = None
        self._liveness: Liveness | None = None
        self._hang_detector = HangDetector(bounds)
        self._phases: PhaseLog | None = None
        self._log_start = 0
        """Offset in the log at which this process began."""

    @property
    def name(self) -> str:
        """Name in the store. An actor's changes with each restart, because a fenced name stays fenced."""
        return name_of(self.role, self.num_restarts)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def doing(self) -> Activity:
        """Activity that the process last reported."""
        return self._liveness.read().activity if self._liveness is not None else Activity.STARTING

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts the process in its own session, because the supervisor handles Ctrl-C; it dies with the supervisor."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._phases = PhaseLog(self._log)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.hung = ""
        liveness = Liveness.create()
        output: IO[bytes] = open(self._log, "ab")  # noqa: SIM115  # the child keeps it
        with output:
            self._process = subprocess.Popen(
                [*self.command(), *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(liveness,),
                env={
                    **os.environ,
                    "PYTHONPATH": custom_functions.python_path(),
                    "PYTHONUNBUFFERED": "1",
                    FD_VARIABLE: str(liveness),
                }
                | lifeline(self._mark)
                | self._environment,
            )
        self._liveness = Liveness(liveness)
        self._hang_detector = HangDetector(self._bounds)

    def command(self) -> list[str]:
        """Returns the command line that `start` runs."""
        name = [] if self.role.startswith("learner") else [f"--name={self.name}"]
        if name and self.num_restarts:
            name.append(f"--instead_of={name_of(self.role, self.num_restarts - 1)}")
        return [sys.executable, "-P", "-m", f"launch.{self.role.split('-')[0]}", *self._arguments, *name]

    def end_if_hung(self) -> bool:
        """Kills the process and its children if it hangs, and appends the reason to its log; returns True if so."""
        if self._process is None or self._liveness is None or self._process.poll() is not None:
            return False
        reason = self._hang_detector.look(self._liveness.read())
        if reason is None:
            return False
        self.hung = reason
        with contextlib.suppress(OSError), open(self._log, "a") as log:  # a full disk must not prevent the kill
            log.write(f"{self.name} hung ({reason}); the supervisor kills it\n")
        self.kill()
        return True

    def request_stop(self) -> None:
        """Sends SIGTERM if the process runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        """Waits until the process has exited or `is_over` returns True, then kills it and its children."""
        if self._process is None:
            return
        while self._process.poll() is None and not is_over():
            time.sleep(_LOOK_S)
        self.kill()

    def kill(self) -> None:
        """Kills the process and its children; raises TimeoutError if a killed process does not exit."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.name} (pid {self.pid}) did not exit after SIGKILL") from None
        if self._mark:
            kill_leftovers(lambda mark: mark == self._mark)

    def describe(self) -> str:
        """Returns a short status: exit code, or pid, restarts and phase."""
        code = self.returncode
        if code is not None:
            return f"exited ({code})"
        restarts = [f"restarted {self.num_restarts}x"] if self.num_restarts else []
        phase = self._phases.phase() if self._phases is not None else ""
        return ", ".join([f"pid {self.pid}", *restarts, *filter(None, [phase or SAID.get(self.doing)])])

    def last_error(self) -> str:
        """Returns the log line that best explains the exit."""
        return telling_line(self._log, since=self._log_start)


def name_of(role: str, num_restarts: int) -> str:
    """Returns the store name of a role's process after `num_restarts` restarts; a learner's never changes."""
    return role if num_restarts == 0 or role.startswith("learner") else f"{role}-r{num_restarts}"


_LOG_HEAD = re.compile(r"^[DIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [^\]\s]+\] ")
"""Prefix of absl log lines: level and day, time, thread, and source line."""
_ENGINE_HEAD = re.compile(r"^(?:\([\w-]+(?: pid=\d+)?\) )+")
"""Prefix of vLLM's engine log lines: `(EngineCore pid=7) `."""
_VLLM_HEAD = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")
_POINTS_ELSEWHERE = re.compile(r"root cause|stack trace|see .*(?:above|below)", re.IGNORECASE)
"""Messages that only refer to a cause elsewhere."""
_POINTER_END = re.compile(r"[.;]? *see (?:root cause|stack trace).*", re.IGNORECASE)
_SYSTEM_CAUSE = re.compile(
    r"too many open files|no space left on device|cannot allocate memory|out of memory|oom-?kill|bus error"
    r"|can't start new thread|resource temporarily unavailable|cannot resolve",
    re.IGNORECASE,
)
"""Messages about an exhausted resource, which a library may print before it fails with another error."""
_MAX_LINES, _MAX_CHARS = 2000, 1000


def telling_line(log: pathlib.Path, *, since: int = 0) -> str:
    """Returns the log line after byte `since` that names the cause of a process's exit, without its log prefix.

    That is the last `error: ...` or exception. If it only refers elsewhere ("see root cause above"), the last exception
    that names a cause is used instead, then a line about an exhausted resource, then a reference to the log.
    """
    lines = [line for line in map(_bare, _lines(log, since)) if line]
    telling = [line for line in lines if line.startswith("error: ") or _is_exception(line)]
    causes = [line for line in telling if not _POINTS_ELSEWHERE.search(line)]
    if telling and telling[-1] not in causes:
        causes = causes or [line for line in lines if _SYSTEM_CAUSE.search(line)]
        best = causes[-1] if causes else f"{_POINTER_END.split(telling[-1])[0]}; no cause found in {log}"
    else:
        best = telling[-1] if telling else (lines[-1] if lines else "no output")
    return best.removeprefix("error: ")[:_MAX_CHARS]


def alike(cause: str) -> str:
    """Returns a cause with numbers and addresses masked, so that equal failures compare equal."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause)


def _lines(log: pathlib.Path, since: int) -> list[str]:
    with open(log, "rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace").splitlines()[-_MAX_LINES:]


def _bare(line: str) -> str:
    return _LOG_HEAD.sub("", _VLLM_HEAD.sub("", _ENGINE_HEAD.sub("", line)).strip())


def _is_exception(line: str) -> bool:
    """Returns True for the last line of a traceback (`package.SomeError: message`)."""
    head = line.split(":")[0]
    return ":" in line and head.endswith(("Error", "Exception")) and " " not in head
