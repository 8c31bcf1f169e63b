"""Supervisor: starts a run's processes, restarts dead and hung ones (bounded), and stops them all.

A run has one learner and one actor per engine of this machine. An actor that cannot be restarted is abandoned while
another is left.
"""

import dataclasses
import enum
import signal
import sys
import time
from types import FrameType
from typing import Any

import rich.live
from rich.console import Console

from actor.elastic_control import EngineSizeFile, EngineSizeOverride
from bridge.files import RunLock
from bridge.liveness import Activity
from bridge.processes import stop_signals
from bridge.timeline import Timeline
from configs.run_folder import RunFolder
from launch import cli
from launch.live_view import PlainProgress, RunView, state_texts
from launch.startup import prepare_run
from launch.supervision.backend import LocalBackend, Process, ProcessBackend
from launch.supervision.child import alike
from launch.terminal import make_console

WATCH_EVERY_S = 0.1
"""Interval between checks of the processes, their liveness and the run's metrics, in seconds."""
ENDING_S = 30.0
"""Seconds for a learner to exit after its actor, which exits as soon as the run is finished. Also the grace period of
actors during shutdown."""
RESTARTABLE_CODES = (cli.BUSY, cli.STOPPED)
"""Exit codes of a learner that continues after a restart. After STOPPED the
stop request came from elsewhere, as on a preempted node."""

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""First and maximum pause before restarting a process after a transient failure (`cli.BUSY`), in seconds. The pause
doubles with each consecutive failure."""


class RunOutcome(enum.Enum):
    """Outcome of a run."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNUSABLE = "invalid input"


class Supervisor:
    """Runner of one learner and its actors until the learner is done."""

    def __init__(
        self,
        prepared: prepare_run.PreparedRun,
        console: Console | None = None,
        *,
        backend: ProcessBackend | None = None,
    ) -> None:
        """Locks the run folder; `backend` provides the processes (default: on this machine).

        Raises ValueError if another live supervisor uses this run folder, or there are too few devices.
        """
        folder = prepared.folder.resolve()
        self._config = prepared.config
        self._backend = backend or LocalBackend(prepared.config, folder)
        self._run = RunFolder(folder)
        self._lock = RunLock(self._run.supervisor_lock, "launch.local")
        self._timeline = Timeline(self._run.events, "supervisor")
        self._learner, self._actors = self._backend.learner, self._backend.actors
        self._children = (self._learner, *self._actors)
        self._abandoned: list[Process] = []
        self._view = RunView(prepared.config, prepared.folder)
        self._console = console or make_console()
        self._interrupted = self._force_stop = False
        self._best_step = 0
        self._is_alone = False
        self._ended_s: dict[Process, float] = {}
        """Time at which an actor that exited gracefully was first seen so."""
        self._restart_at_s: dict[Process, float] = {}
        """Time at which a waiting process is to be restarted."""
        self._causes: dict[Process, str] = {}
        """Masked cause of the last startup failure per process."""
        self._num_resizes: dict[Process, int] = {}
        self.last_error = ""
        self._exit: dict[str, Any] = {}
        """Event arguments of the process that `last_error` describes."""

    def run(self) -> RunOutcome:
        """Starts, watches and stops the processes."""
        previous = {n: signal.signal(n, self._interrupt) for n in stop_signals()}
        try:
            for line in self._backend.open(lambda: self._interrupted):
                self._event(line)
            for child in self._children:
                self._start(child)
            if self._console.is_terminal:
                with rich.live.Live(console=self._console, refresh_per_second=4, screen=False) as live:
                    return self._watch(lambda rows: live.update(self._view.render()))
            return self._watch(PlainProgress(self._view, self._plain).update)
        except InterruptedError:  # while it waited for resources
            return RunOutcome.INTERRUPTED
        except OSError as e:  # an unwritable log, or a process that survives SIGKILL
            self.last_error = cli.one_line(e)
            return RunOutcome.FAILED
        finally:
            self._stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self, show) -> RunOutcome:
        while True:
            if self._interrupted:
                return RunOutcome.INTERRUPTED
            code = self._learner.returncode
            self._view.status = {c.name: self._describe(c) for c in self._children}
            show(self._view.update())
            self._update_restart_counts()
            self._report_no_actors()
            if code == 0:
                return RunOutcome.DONE
            for child in self._children:
                if child in self._abandoned or self._waits_for_its_start(child):
                    continue
                child.end_if_hung()
                code = child.returncode
                if code == 0 and child is self._learner:
                    continue  # finished after the check above
                if code == 0 and self._may_be_ending(child):
                    continue
                if code is None or self._may_restart(child) or self._may_go_on_without(child):
                    continue
                return RunOutcome.UNUSABLE if code == cli.USAGE_ERROR else RunOutcome.FAILED
            time.sleep(WATCH_EVERY_S)

    def _may_be_ending(self, actor: Process) -> bool:
        """Returns True if an actor that exited gracefully may know of the run's end before the supervisor does."""
        now_s = time.monotonic()
        if now_s - self._ended_s.setdefault(actor, now_s) < ENDING_S:
            return True
        del self._ended_s[actor]
        return False

    def _may_go_on_without(self, child: Process) -> bool:
        """Abandons an actor that cannot be restarted, if its input was valid and another actor is left."""
        if child is self._learner or child.returncode == cli.USAGE_ERROR:
            return False
        if len(self._abandoned) + 1 == len(self._actors):
            return False
        self._abandoned.append(child)
        self._report_exit("; the run continues without it")
        return True

    def _describe(self, child: Process) -> str:
        return f"{child.describe()}, not restarted" if child in self._abandoned else child.describe()

    def _may_restart(self, child: Process) -> bool:
        """Restarts a dead child, unless it used up its restarts or would fail again for the same reason."""
        code = child.returncode
        assert code is not None
        child.kill()  # also kills its leftover children
        if code == cli.RESIZE:
            self._num_resizes[child] = self._num_resizes.get(child, 0) + 1
            count = f"({self._num_resizes[child]})"
            limits = self._limits_of(child)
            self._event(f"restarting {child.name} with new engine limits {count}: {limits}", process=child.name)
            self._start(child)  # under the same name, because it exited gracefully
            return True
        if child.hung:
            self._exit = {"process": child.name, "how": f"hung ({child.hung}) and was killed"}
            self.last_error = f"{child.name} {self._exit['how']}"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            cause = child.last_error()
            self._exit = {"process": child.name, "how": how, "signal": max(0, -code), "cause": cause}
            self.last_error = f"{child.name} {how}: {cause}"
            if self._fails_alike(child, cause):
                note = self._exit["note"] = " (same startup failure twice; not restarted)"
                self.last_error += note
                return False
        if code == cli.USAGE_ERROR or (child is self._learner and code > 0 and code not in RESTARTABLE_CODES):
            return False
        if child.num_restarts_in_a_row >= self._config.actor.max_restarts:
            note = self._exit["note"] = f" (after {child.num_restarts_in_a_row} restarts without a new step)"
            self.last_error += note
            return False
        child.num_restarts += 1
        child.num_restarts_in_a_row += 1
        pause_s = 0.0
        if code == cli.BUSY:
            pause_s = min(FIRST_PAUSE_S * 2 ** (child.num_restarts_in_a_row - 1), MAX_PAUSE_S)
        later = f" in {pause_s:g} s" if pause_s else ""
        self._report_exit(f"; restarting{later} (restart {child.num_restarts})")
        self._restart_at_s[child] = time.monotonic() + pause_s
        self._waits_for_its_start(child)
        return True

    def _fails_alike(self, child: Process, cause: str) -> bool:
        """Returns True if a process failed in its start for the same cause as its predecessor."""
        before, now = self._causes.pop(child, None), None
        if child.returncode == 1 and child.doing is Activity.STARTING:
            now = self._causes[child] = alike(cause)
        return now is not None and now == before

    def _limits_of(self, actor: Process) -> str:
        of = self._config.actor
        default = EngineSizeOverride(max_num_seqs=of.max_num_seqs, tensor_parallel_size=of.tensor_parallel_size)
        file = EngineSizeFile(self._run.limits(actor.role), default=default, max_tensor_parallel_size=sys.maxsize)
        try:
            limits = dataclasses.asdict(file.read())
        except (ValueError, OSError) as e:  # the actor reports it as well
            return cli.one_line(e)
        return ", ".join(f"{name}={value}" for name, value in limits.items())

    def _start(self, child: Process) -> None:
        child.start()
        self._timeline.instant("start", process=child.name)

    def _waits_for_its_start(self, child: Process) -> bool:
        """Returns True if the process waits for a later restart; restarts it when due."""
        if child not in self._restart_at_s:
            return False
        if time.monotonic() < self._restart_at_s[child]:
            return True
        del self._restart_at_s[child]
        self._start(child)
        return False

    def _update_restart_counts(self) -> None:
        """Resets the restart counts of working processes once the run reaches a new best step."""
        step = self._view.steps[-1]["step"] if self._view.steps else 0
        if step > self._best_step:
            self._best_step = step
            for child in self._children:
                # a new step does not prove that a starting actor works
                if child is self._learner or child.doing is not Activity.STARTING:
                    child.num_restarts_in_a_row = 0

    def _report_no_actors(self) -> None:
        """Reports once that no actor is alive. While the learner works off queued groups, the last state holds."""
        was_alone, doing = self._is_alone, self._learner.doing
        if doing in (Activity.NO_ACTORS, Activity.WAITING):
            self._is_alone = doing is Activity.NO_ACTORS
        if self._is_alone and not was_alone:
            actors = "; ".join(state_texts({a.name: self._describe(a) for a in self._actors}))
            self._event(f"no live actor: the learner waits; {actors}")

    def _event(self, line: str, **about: Any) -> None:
        self._warn(line)
        self._timeline.instant("message", line=line, **about)

    def _report_exit(self, then: str) -> None:
        self._warn(self.last_error + then)
        self._timeline.instant("exit", **self._exit, then=then)

    def _warn(self, line: str) -> None:
        self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._force_stop = self._force_stop or (self._interrupted and number == signal.SIGINT)
        self._interrupted = True

    def _stop(self) -> None:
        """Stops all processes: the learner gracefully within its timeout, or immediately on a second Ctrl-C."""
        for child in self._children:
            child.request_stop()
        limit_s = self._config.supervision.shutdown_grace_s
        if self._interrupted:
            self._event(f"shutting down (timeout {limit_s:g} s); press Ctrl-C again to force quit")
        for child in self._children:  # the learner first
            deadline_s = time.monotonic() + (limit_s if child is self._learner else ENDING_S)
            try:
                child.kill_after(lambda end_s=deadline_s: self._force_stop or time.monotonic() >= end_s)
            except TimeoutError as e:
                self._event(f"not killed: {e}")
        self._backend.close()
        self._timeline.instant("end")
        self._timeline.close()
        self._lock.release()
