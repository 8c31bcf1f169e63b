"""A supervised process: start, log, state, kill, last error line."""

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
from launch.supervision.process_tree import environment as lifeline
from launch.supervision.process_tree import kill_leftovers

_MAX_BYTES = 1 << 20
"""Read at one look; of a longer piece the end."""


class PhaseLog:
    """Reads a log as it grows, from where it ended when this was made."""

    def __init__(self, log: pathlib.Path) -> None:
        """The log need not exist yet; what is in it is of an earlier process."""
        self._log, self._rest, self._phase = log, b"", ""
        try:
            self._offset = log.stat().st_size
        except FileNotFoundError:
            self._offset = 0

    def phase(self) -> str:
        """What the process is at; empty if it says nothing of it."""
        try:
            size = self._log.stat().st_size
            if size != self._offset:
                self._read(size)
        except OSError:  # it is not there yet, or its disk fails: what was known holds
            pass
        return self._phase

    def _read(self, size: int) -> None:
        if size < self._offset:  # cut short
            self._offset, self._rest = 0, b""
        with open(self._log, "rb") as file:
            file.seek(max(self._offset, size - _MAX_BYTES))
            data = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            said = read_phase(line.decode(errors="replace"))
            self._phase = self._phase if said is None else said


END_S = 30.0
"""How long a process that was killed may take to be gone."""
_LOOK_S = 0.05
_ENDLESS = HangTimeouts(
    first_heartbeat_timeout_s=float("inf"),
    heartbeat_timeout_s=float("inf"),
    start_timeout_s=float("inf"),
    progress_timeout_s=float("inf"),
)
SAID = {Activity.STARTING: "starting", Activity.WAITING: "waiting", Activity.NO_ACTORS: "waiting, no live actor"}


class Child:
    """A role of the run: the process that fills it now, or the one that is started in its place, and their log.

    It is never spoken to, unlike a tool's `pipes.RpcProcess`: what it does is in the run folder. All it says to us is
    that it lives (`bridge.liveness`).
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
        bounds: HangTimeouts = _ENDLESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Not started.

        Args:
          role: "learner" ("learner-0", "learner-1", ... where it is several processes), or "actor-0", "actor-1", ...
          arguments: of its command.
          log: where its output goes.
          devices: what CUDA_VISIBLE_DEVICES is set to, if anything.
          environment: what else is set for it.
          mark: by which it and all that it starts are found again; its own, or empty for one that isn't looked for.
          bounds: for how long it may be silent.
          clock: monotonic, in seconds.
        """
        self.role = role
        self.num_restarts = 0
        self.num_restarts_in_a_row = 0
        """Since the run last made progress."""
        self.hung = ""
        """What showed that the process before this one, or this one before it was killed, hung; empty if it did not."""
        self._arguments = arguments
        self._log = log
        self._environment = dict(environment) | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})
        self._mark, self._bounds, self._clock = mark, bounds, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._liveness: Liveness | None = None
        self._hang_detector = HangDetector(bounds, clock)
        self._phases: PhaseLog | None = None
        self._log_start = 0
        """Offset in the log at which this process began."""

    @property
    def name(self) -> str:
        """The name it has in the store; an actor's is another one after each restart: a fenced name stays fenced."""
        return name_of(self.role, self.num_restarts)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def doing(self) -> Activity:
        """What it last said it does."""
        return self._liveness.read().activity if self._liveness is not None else Activity.STARTING

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts it in a session of its own (Ctrl-C is ours to handle); it dies with us.

        Args:
          more: arguments of this start besides those of every one.
        """
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
        self._hang_detector = HangDetector(self._bounds, self._clock)

    def command(self) -> list[str]:
        """What `start` runs."""
        name = [] if self.role.startswith("learner") else [f"--name={self.name}"]
        if name and self.num_restarts:
            name.append(f"--instead_of={name_of(self.role, self.num_restarts - 1)}")
        return [sys.executable, "-P", "-m", f"launch.{self.role.split('-')[0]}", *self._arguments, *name]

    def end_if_hung(self) -> bool:
        """Looks whether it lives and works; kills it with all it started if it doesn't, and says so in its log."""
        if self._process is None or self._liveness is None or self._process.poll() is not None:
            return False
        reason = self._hang_detector.look(self._liveness.read())
        if reason is None:
            return False
        self.hung = reason
        with contextlib.suppress(OSError), open(self._log, "a") as log:  # a full disk is no reason to let it hang
            log.write(f"{self.name} hung ({reason}) and is killed by its supervisor\n")
        self.kill()
        return True

    def request_stop(self) -> None:
        """SIGTERM, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        """Waits until the process has ended or the wait is over, then kills it and all it started."""
        if self._process is None:
            return
        while self._process.poll() is None and not is_over():
            time.sleep(_LOOK_S)
        self.kill()

    def kill(self) -> None:
        """Kills the process, if it still runs, and all it started.

        Raises:
          TimeoutError: one of them does not end.
        """
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.name} (pid {self.pid}) was killed and does not end") from None
        if self._mark:
            kill_leftovers(lambda mark: mark == self._mark, deadline_s=END_S)

    def describe(self) -> str:
        """What it is and does, in a few words."""
        code = self.returncode
        if code is not None:
            return f"ended ({code})"
        restarts = [f"restarted {self.num_restarts}x"] if self.num_restarts else []
        phase = self._phases.phase() if self._phases is not None else ""
        return ", ".join([f"pid {self.pid}", *restarts, *filter(None, [phase or SAID.get(self.doing)])])

    def last_error(self) -> str:
        """The line of its log that says most about its end."""
        return telling_line(self._log, since=self._log_start)


def name_of(role: str, num_restarts: int) -> str:
    """The name in the store of a role's process that was started again so often; a learner's stays."""
    return role if num_restarts == 0 or role.startswith("learner") else f"{role}-r{num_restarts}"


_LOG_HEAD = re.compile(r"^[DIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [^\]\s]+\] ")
"""Prefix of a line of absl's log: its level and day, the time, the thread, and the source line."""
_ENGINE_HEAD = re.compile(r"^(?:\([\w-]+(?: pid=\d+)?\) )+")
"""Prefix that vLLM puts before each line of an engine's processes: `(EngineCore pid=7) `."""
_VLLM_HEAD = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")
_POINTS_ELSEWHERE = re.compile(r"root cause|stack trace|see .*(?:above|below)", re.IGNORECASE)
"""Messages that name no cause, but where it is to be found."""
_POINTER_END = re.compile(r"[.;]? *see (?:root cause|stack trace).*", re.IGNORECASE)
_SYSTEM_CAUSE = re.compile(
    r"too many open files|no space left on device|cannot allocate memory|out of memory|oom-?kill|bus error"
    r"|can't start new thread|resource temporarily unavailable|cannot resolve",
    re.IGNORECASE,
)
"""Messages of a resource that ran out; a library may print one in any form before it fails with something else."""
_MAX_LINES, _MAX_CHARS = 2000, 1000


def telling_line(log: pathlib.Path, *, since: int = 0) -> str:
    """Returns the line of a process's log that names the cause of its end, without the head of a log's line.

    That is the last `error: ...` or exception; where it only points elsewhere ("see root cause above"), the last
    exception before it that names something, else a line about what the system ran out of, else where the log is.

    Args:
      log: the file.
      since: where in it the process began, in bytes.
    """
    lines = [line for line in map(_bare, _lines(log, since)) if line]
    telling = [line for line in lines if line.startswith("error: ") or _is_exception(line)]
    causes = [line for line in telling if not _POINTS_ELSEWHERE.search(line)]
    if telling and telling[-1] not in causes:
        causes = causes or [line for line in lines if _SYSTEM_CAUSE.search(line)]
        best = causes[-1] if causes else f"{_POINTER_END.split(telling[-1])[0]}; its log {log} names no cause"
    else:
        best = telling[-1] if telling else (lines[-1] if lines else "it printed nothing")
    return best.removeprefix("error: ")[:_MAX_CHARS]


def alike(cause: str) -> str:
    """Returns a cause without what differs between two processes that fail alike: numbers and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause)


def _lines(log: pathlib.Path, since: int) -> list[str]:
    with open(log, "rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace").splitlines()[-_MAX_LINES:]


def _bare(line: str) -> str:
    return _LOG_HEAD.sub("", _VLLM_HEAD.sub("", _ENGINE_HEAD.sub("", line)).strip())


def _is_exception(line: str) -> bool:
    """Returns True for a traceback's last line (`package.SomeError: what`)."""
    head = line.split(":")[0]
    return ":" in line and head.endswith(("Error", "Exception")) and " " not in head
