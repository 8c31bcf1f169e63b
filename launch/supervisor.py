"""Starts a run's processes, watches them, starts dead ones again (bounded), and stops them all."""

import enum
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import IO

import rich.live
from rich.console import Console

from actor.weights.local_copy import sweep
from bridge.run_lock import RunLock
from configs import extension
from configs.run_folder import RunFolder, snapshot_folder
from launch import command_line
from launch.lifeline import VARIABLE
from launch.view import RunView

WATCH_EVERY_S = 0.1
"""How often the processes' exit codes and the run's metrics are looked at."""
PLAIN_LINE_S = 5.0
STOP_S = 30.0
"""How long a process may take to end before it is killed."""


class Ending(enum.Enum):
    """How a run ended."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Child:
    """A role of the run: the process that fills it now, or the one that is started in its place, and their log.

    It is never spoken to, unlike a tool's `pipes.PipedProcess`: what it does is in the run folder.
    """

    def __init__(self, role: str, arguments: list[str], log: pathlib.Path, *, devices: str) -> None:
        """Not started; `devices` is what CUDA_VISIBLE_DEVICES is set to, if anything."""
        self.role = role
        self.num_restarts = 0
        self._arguments = arguments
        self._log = log
        self._devices = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """The name it has in the store; another one after each restart, since a fenced name stays fenced."""
        return self.role if self.num_restarts == 0 else f"{self.role}-r{self.num_restarts}"

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it in a session of its own (Ctrl-C is ours to handle); it dies with us."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        output: IO[bytes] = open(self._log, "ab")  # noqa: SIM115  # the child keeps it
        with output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"launch.{self.role.split('-')[0]}", *self._arguments]
                + ([f"--name={self.name}"] if self.role != "learner" else []),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": extension.python_path(),
                    VARIABLE: str(os.getpid()),
                    "PYTHONUNBUFFERED": "1",
                }
                | self._devices,
            )

    def ask_to_stop(self) -> None:
        """SIGTERM, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill_after(self, deadline_s: float) -> None:
        """Waits until `deadline_s` (monotonic), then kills the process and all it started."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_error(self) -> str:
        """The line of its log that says most about its end."""
        lines = [x for x in self._log.read_text(errors="replace").splitlines()[-400:] if x.strip()]
        telling = [x for x in lines if x.startswith("error: ") or _is_exception(x)]
        best = telling[-1] if telling else (lines[-1] if lines else "it printed nothing")
        return best.removeprefix("error: ")


class Supervisor:
    """Runs one learner and one actor until the learner is done."""

    def __init__(self, prepared: command_line.Prepared, console: Console | None = None) -> None:
        """Starts nothing yet.

        Raises:
          ValueError: another live supervisor has this run folder.
        """
        folder = prepared.folder.resolve()
        run, config = RunFolder(folder), prepared.config
        arguments = [f"--run_dir={folder}"]
        self._config = prepared.config
        self._folder = folder
        self._lock = RunLock(run.supervisor_lock, "launch.local")
        self._learner = Child("learner", arguments, run.log("learner"), devices=config.mesh.devices)
        # By its role, so that limits outlive the new name after a restart.
        limits = f"--limits={run.limits('actor-0')}"
        self._actor = Child("actor-0", [*arguments, limits], run.log("actor-0"), devices=config.actor.devices)
        self._view = RunView(prepared.config, prepared.folder)
        self._console = console or Console()
        self._interrupted = False
        self._said_s = 0.0
        self.last_error = ""

    def run(self) -> Ending:
        """Starts, watches and stops the processes."""
        previous = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self._learner.start()
            self._actor.start()
            if self._console.is_terminal:
                with rich.live.Live(console=self._console, refresh_per_second=4, screen=False) as live:
                    return self._watch(lambda rows: live.update(self._view.render()))
            return self._watch(self._say)
        finally:
            self._stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self, show) -> Ending:
        while True:
            if self._interrupted:
                return Ending.INTERRUPTED
            code = self._learner.returncode
            self._view.status = {c.name: _describe(c) for c in (self._learner, self._actor)}
            show(self._view.update())
            if code == 0:
                return Ending.DONE
            if code is not None and not self._may_restart(self._learner, was_killed=code < 0):
                return Ending.FAILED
            code = self._actor.returncode
            if code is not None and not self._may_restart(self._actor, was_killed=True):
                return Ending.FAILED
            time.sleep(WATCH_EVERY_S)

    def _may_restart(self, child: Child, *, was_killed: bool) -> bool:
        """Starts a dead child again. Not for ever, and not one that will fail again for the same reason."""
        code = child.returncode
        if code == command_line.RESIZE:
            self._console.print(f"{child.name} starts again with other engine limits")
            child.start()  # under its name: it left in order
            return True
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        self.last_error = f"{child.name} {how}: {child.last_error()}"
        if code == command_line.USAGE_ERROR or not was_killed:
            return False
        if child.num_restarts >= self._config.actor.max_restarts:
            self.last_error += f" (after {child.num_restarts} restarts)"
            return False
        child.num_restarts += 1
        self._console.print(f"[yellow]{self.last_error}; starting it again ({child.num_restarts})[/yellow]")
        child.start()
        return True

    def _say(self, rows: list[dict]) -> None:
        for row in rows:
            if row["kind"] == "eval":
                self._console.print(f"held-out reward {row['eval/reward']:.3f} at step {row['step']}")
        if time.monotonic() - self._said_s > PLAIN_LINE_S:
            self._said_s = time.monotonic()
            self._console.print(self._view.line(), soft_wrap=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def _stop(self) -> None:
        for child in (self._learner, self._actor):
            child.ask_to_stop()
        deadline = time.monotonic() + STOP_S
        for child in (self._learner, self._actor):
            child.kill_after(deadline)
        self._clean_up()
        self._lock.release()

    def _clean_up(self) -> None:
        """Removes what killed processes left in shared memory, unless a learner started by hand lives on it."""
        try:
            lock = RunLock(RunFolder(self._folder).learner_lock, "learner")
        except ValueError:
            return
        snapshots = snapshot_folder(self._config)
        shutil.rmtree(snapshots, ignore_errors=True)
        sweep(snapshots)
        lock.release()


def _describe(child: Child) -> str:
    code = child.returncode
    if code is None:
        return f"pid {child.pid}" + (f", restarted {child.num_restarts}x" if child.num_restarts else "")
    return f"ended ({code})"


def _is_exception(line: str) -> bool:
    """Whether a log line is a traceback's last one (`package.SomeError: what`)."""
    head = line.split(":")[0]
    return ":" in line and head.endswith(("Error", "Exception")) and " " not in head
