"""Starts a run's processes, watches them, starts dead and hung ones again (bounded), and stops them all.

A run has one learner and an actor for each engine of this machine. What becomes of one actor leaves the others alone:
one that can't be started any more is given up while another is left.
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
from bridge.timeline import Timeline
from configs.run_folder import RunFolder
from launch import cli
from launch.console.live_view import PlainProgress, RunView, told
from launch.startup import prepare_run
from launch.supervision.backend import LocalBackend, ProcessBackend
from launch.supervision.child import alike
from launch.supervision.process_group import Process
from launch.terminal import make_console

WATCH_EVERY_S = 0.1
"""How often the processes, their signs of life and the run's metrics are looked at."""
ENDING_S = 30.0
"""How long a learner may take to end after its actor did: the actor ends as soon as it hears that the run is done. And
how long an actor that was told to end may take once the learner has ended."""
RESTARTABLE_CODES = (cli.BUSY, cli.STOPPED)
"""Codes of a learner that goes on when it is started again; the second one is of one whom somebody else told to stop,
as on a node that is taken away."""

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""How long a process waits to be started again that met something passing (`command_line.BUSY`), as a full disk or a
store that is away; doubled each time in a row."""


class RunOutcome(enum.Enum):
    """How a run ended."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNUSABLE = "unusable input"


def _signals() -> list[signal.Signals]:
    """Signals that stop a run in order; not SIGHUP where nohup ignores it: such a run outlives its terminal."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP])]


class Supervisor:
    """Runs one learner and its actors until the learner is done."""

    def __init__(
        self,
        prepared: prepare_run.PreparedRun,
        console: Console | None = None,
        *,
        backend: ProcessBackend | None = None,
    ) -> None:
        """Starts nothing yet; `crew` is the run's processes, if not those of this machine.

        Raises:
          ValueError: another live supervisor has this run folder, or there are too few devices.
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
        """When actors that ended in order were first seen so."""
        self._restart_at_s: dict[Process, float] = {}
        """When those are to be started again that wait for it."""
        self._causes: dict[Process, str] = {}
        """Last cause by process of a failure at its start."""
        self._num_resizes: dict[Process, int] = {}
        self.last_error = ""
        self._exit: dict[str, Any] = {}
        """Of the process that `last_error` is about: the arguments of its event."""

    def run(self) -> RunOutcome:
        """Starts, watches and stops the processes."""
        previous = {n: signal.signal(n, self._interrupt) for n in _signals()}
        try:
            for line in self._backend.open(lambda: self._interrupted):
                self._event(line)
            for child in self._children:
                self._start(child)
            if self._console.is_terminal:
                with rich.live.Live(console=self._console, refresh_per_second=4, screen=False) as live:
                    return self._watch(lambda rows: live.update(self._view.render()))
            return self._watch(PlainProgress(self._view, self._plain).update)
        except InterruptedError:  # while it waited for places
            return RunOutcome.INTERRUPTED
        except OSError as e:  # a log that can't be written, a process that not even SIGKILL ends
            self.last_error = cli.first_line(e)
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
                    continue  # done, since the look above
                if code == 0 and self._may_be_ending(child):
                    continue
                if code is None or self._may_restart(child) or self._may_go_on_without(child):
                    continue
                return RunOutcome.UNUSABLE if code == cli.USAGE_ERROR else RunOutcome.FAILED
            time.sleep(WATCH_EVERY_S)

    def _may_be_ending(self, actor: Process) -> bool:
        """Whether an actor, which ended in order, may have heard that the run is done before we did."""
        now_s = time.monotonic()
        if now_s - self._ended_s.setdefault(actor, now_s) < ENDING_S:
            return True
        del self._ended_s[actor]
        return False

    def _may_go_on_without(self, child: Process) -> bool:
        """Gives up an actor that is not started again, if another is left; not one that was started with nonsense."""
        if child is self._learner or child.returncode == cli.USAGE_ERROR:
            return False
        if len(self._abandoned) + 1 == len(self._actors):
            return False
        self._abandoned.append(child)
        self._report_exit("; the run goes on without it")
        return True

    def _describe(self, child: Process) -> str:
        return f"{child.describe()}, given up" if child in self._abandoned else child.describe()

    def _may_restart(self, child: Process) -> bool:
        """Starts a dead child again. Not for ever, and not one that will fail again for the same reason."""
        code = child.returncode
        assert code is not None
        child.kill()  # what it started and left
        if code == cli.RESIZE:
            self._num_resizes[child] = self._num_resizes.get(child, 0) + 1
            count = f"({self._num_resizes[child]})"
            limits = self._limits_of(child)
            self._event(f"{child.name} starts again with other engine limits {count}: {limits}", process=child.name)
            self._start(child)  # under its name: it left in order
            return True
        if child.hung:
            self._exit = {"process": child.name, "how": f"hung ({child.hung}) and was killed"}
            self.last_error = f"{child.name} {self._exit['how']}"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            cause = child.last_error()
            self._exit = {"process": child.name, "how": how, "signal": max(0, -code), "cause": cause}
            self.last_error = f"{child.name} {how}: {cause}"
            if self._fails_alike(child, cause):
                note = self._exit["note"] = " (twice alike in its start: it is not started again)"
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
        self._report_exit(f"; starting it again{later} ({child.num_restarts})")
        self._restart_at_s[child] = time.monotonic() + pause_s
        self._waits_for_its_start(child)
        return True

    def _fails_alike(self, child: Process, cause: str) -> bool:
        """Returns True if a process failed in its start for the same cause as the one before it."""
        before, now = self._causes.pop(child, None), None
        if child.returncode == 1 and child.doing is Activity.STARTING:
            now = self._causes[child] = alike(cause)
        return now is not None and now == before

    def _limits_of(self, actor: Process) -> str:
        """What an actor's engine is started with."""
        of = self._config.actor
        default = EngineSizeOverride(max_num_seqs=of.max_num_seqs, tensor_parallel_size=of.tensor_parallel_size)
        file = EngineSizeFile(self._run.limits(actor.role), default=default, max_tensor_parallel_size=sys.maxsize)
        try:
            limits = dataclasses.asdict(file.read())
        except (ValueError, OSError) as e:  # the actor will say it, too
            return cli.first_line(e)
        return ", ".join(f"{name}={value}" for name, value in limits.items())

    def _start(self, child: Process) -> None:
        child.start()
        self._timeline.instant("start", process=child.name)

    def _waits_for_its_start(self, child: Process) -> bool:
        """Whether it is to be started again later; starts it if it is time."""
        if child not in self._restart_at_s:
            return False
        if time.monotonic() < self._restart_at_s[child]:
            return True
        del self._restart_at_s[child]
        self._start(child)
        return False

    def _update_restart_counts(self) -> None:
        """A step that the run never reached before: whatever was started again since works."""
        step = self._view.steps[-1]["step"] if self._view.steps else 0
        if step > self._best_step:
            self._best_step = step
            for child in self._children:
                if child is self._learner or child.doing is not Activity.STARTING:  # others' work says nothing of it
                    child.num_restarts_in_a_row = 0

    def _report_no_actors(self) -> None:
        """Says once that no actor lives; between two waits a learner works off what is there, and nobody lives yet."""
        was_alone, doing = self._is_alone, self._learner.doing
        if doing in (Activity.NO_ACTORS, Activity.WAITING):
            self._is_alone = doing is Activity.NO_ACTORS
        if self._is_alone and not was_alone:
            actors = "; ".join(told({a.name: self._describe(a) for a in self._actors}))
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
        """Ends all: the learner in order, within its bound; a second Ctrl-C ends it at once."""
        for child in self._children:
            child.request_stop()
        limit_s = self._config.supervision.shutdown_grace_s
        if self._interrupted:
            self._event(f"stopping in order, within {limit_s:g} s; another Ctrl-C ends all at once")
        for child in self._children:  # the learner first
            deadline_s = time.monotonic() + (limit_s if child is self._learner else ENDING_S)
            try:
                child.kill_after(lambda end_s=deadline_s: self._force_stop or time.monotonic() >= end_s)
            except TimeoutError as e:
                self._event(f"left behind: {e}")
        self._backend.close()
        self._timeline.instant("end")
        self._timeline.close()
        self._lock.release()
