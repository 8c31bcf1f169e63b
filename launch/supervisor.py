"""Starts a run's processes, watches them, starts dead and hung ones again (bounded), and stops them all."""

import contextlib
import enum
import pathlib
import shutil
import signal
import time
from types import FrameType

import rich.live
from rich.console import Console

from actor.weights.local_copy import sweep
from bridge.pulse import Doing
from bridge.run_lock import RunLock
from bridge.snapshots.layout import WRITER
from configs.run_folder import RunFolder, run_id, snapshot_folder
from configs.schema import Config
from launch import command_line
from launch.child import Child
from launch.lifeline import end_marked
from launch.view import RunView
from launch.vigil import Bounds

WATCH_EVERY_S = 0.1
"""How often the processes, their signs of life and the run's metrics are looked at."""
PLAIN_LINE_S = 5.0
STOP_S = 30.0
"""How long a process may take to end before it is killed."""


class Ending(enum.Enum):
    """How a run ended."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNUSABLE = "unusable input"


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
        self._config = config
        self._run = run
        self._lock = RunLock(run.supervisor_lock, "launch.local")
        self._mark = run_mark(folder)
        self._learner = Child(
            "learner",
            arguments,
            run.log("learner"),
            devices=config.mesh.devices,
            mark=f"{self._mark}learner",
            bounds=bounds_of(config, start_s=config.supervision.start_s, work_s=config.supervision.work_s),
        )
        # By its role, so that limits outlive the new name after a restart.
        limits = f"--limits={run.limits('actor-0')}"
        self._actor = Child(
            "actor-0",
            [*arguments, limits, "--leave_s=0"],  # when the run ends, what it has is of no use any more
            run.log("actor-0"),
            devices=config.actor.devices,
            mark=f"{self._mark}actor-0",
            bounds=bounds_of(
                config,
                # At its own deadline it ends itself, and says why.
                start_s=config.actor.start_timeout_s + config.supervision.heartbeat_s,
                work_s=config.supervision.engine_s,
            ),
        )
        self._children = (self._learner, self._actor)
        self._view = RunView(prepared.config, prepared.folder)
        self._console = console or Console()
        self._interrupted = False
        self._said_s = 0.0
        self._best_step = 0
        self._is_alone = False
        self.last_error = ""

    def run(self) -> Ending:
        """Starts, watches and stops the processes."""
        previous = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self._end_orphans()
            for child in self._children:
                child.start()
            if self._console.is_terminal:
                with rich.live.Live(console=self._console, refresh_per_second=4, screen=False) as live:
                    return self._watch(lambda rows: live.update(self._view.render()))
            return self._watch(self._say)
        except OSError as e:  # a log that can't be written, a process that not even SIGKILL ends
            self.last_error = command_line.one_line(e)
            return Ending.FAILED
        finally:
            self._stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self, show) -> Ending:
        while True:
            if self._interrupted:
                return Ending.INTERRUPTED
            code = self._learner.returncode
            self._view.status = {c.name: c.describe() for c in self._children}
            show(self._view.update())
            self._note_progress()
            self._note_actors()
            if code == 0:
                return Ending.DONE
            for child in self._children:
                child.end_if_hung()
                code = child.returncode
                if code == 0 and child is self._learner:
                    continue  # done, since the look above
                if code is not None and not self._may_restart(child):
                    return Ending.UNUSABLE if code == command_line.USAGE_ERROR else Ending.FAILED
            time.sleep(WATCH_EVERY_S)

    def _may_restart(self, child: Child) -> bool:
        """Starts a dead child again. Not for ever, and not one that will fail again for the same reason."""
        code = child.returncode
        assert code is not None
        child.kill()  # what it started and left
        if code == command_line.RESIZE:
            self._console.print(f"{child.name} starts again with other engine limits")
            child.start()  # under its name: it left in order
            return True
        if child.hung:
            self.last_error = f"{child.name} hung ({child.hung}) and was killed"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self.last_error = f"{child.name} {how}: {child.last_error()}"
        if code == command_line.USAGE_ERROR or (child is self._learner and code > 0 and code != command_line.BUSY):
            return False
        if child.num_restarts_in_a_row >= self._config.actor.max_restarts:
            self.last_error += f" (after {child.num_restarts_in_a_row} restarts without a new step)"
            return False
        child.num_restarts += 1
        child.num_restarts_in_a_row += 1
        self._tell(f"{self.last_error}; starting it again ({child.num_restarts})")
        child.start()
        return True

    def _note_progress(self) -> None:
        """A step that the run never reached before: whatever was started again since works."""
        step = self._view.steps[-1]["step"] if self._view.steps else 0
        if step > self._best_step:
            self._best_step = step
            for child in self._children:
                child.num_restarts_in_a_row = 0

    def _note_actors(self) -> None:
        """Says once that no actor lives; between two waits a learner works off what is there, and nobody lives yet."""
        was_alone, doing = self._is_alone, self._learner.doing
        if doing in (Doing.ALONE, Doing.WAITING):
            self._is_alone = doing is Doing.ALONE
        if self._is_alone and not was_alone:
            self._tell(f"no live actor: the learner waits; {self._actor.name}: {self._actor.describe()}")

    def _tell(self, line: str) -> None:
        self._console.print(line, style="yellow", markup=False, soft_wrap=True)

    def _say(self, rows: list[dict]) -> None:
        for row in rows:
            if row["kind"] == "eval":
                self._console.print(f"held-out reward {row['eval/reward']:.3f} at step {row['step']}")
        if time.monotonic() - self._said_s > PLAIN_LINE_S:
            self._said_s = time.monotonic()
            self._console.print(self._view.line(), soft_wrap=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def _end_orphans(self) -> None:
        """Ends what a killed start of this very run left, before its names are claimed; ours is the run's lock."""
        for orphan in end_marked(lambda mark: mark.startswith(self._mark)):
            role = orphan.mark.removeprefix(self._mark)
            self._tell(f"ended process {orphan.pid} ({orphan.title}) of {role}, left by an earlier start of this run")

    def _stop(self) -> None:
        for child in self._children:
            child.ask_to_stop()
        deadline = time.monotonic() + STOP_S
        for child in self._children:
            try:
                child.kill_after(deadline)
            except TimeoutError as e:
                self._tell(f"left behind: {e}")
        self._clean_up()
        self._lock.release()

    def _clean_up(self) -> None:
        """Removes what killed processes left in shared memory, unless a learner lives on it.

        That is one started by hand, or, where this folder is a copy, the original's: it has the same snapshots.
        """
        snapshots = snapshot_folder(self._config)
        with contextlib.ExitStack() as locks, contextlib.suppress(ValueError):
            locks.callback(RunLock(self._run.learner_lock, "learner").release)
            if snapshots.is_dir():
                locks.callback(RunLock(snapshots / WRITER, "learner").release)
            shutil.rmtree(snapshots, ignore_errors=True)
            sweep(snapshots)


def run_mark(folder: pathlib.Path) -> str:
    """What the marks of a run's processes begin with; a copy of a run's folder has its id, and is another run."""
    return f"{run_id(folder)}:{folder.resolve()}:"


def bounds_of(config: Config, *, start_s: float, work_s: float) -> Bounds:
    """How long a process of the run may be silent."""
    limits = config.supervision
    return Bounds(first_beat_s=limits.first_heartbeat_s, beat_s=limits.heartbeat_s, start_s=start_s, work_s=work_s)
