"""Processes of a running job, stopped and killed at random, and what became of the run."""

import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

from bridge.store.sqlite_database import StoreBusyError
from tests.integration.support import jobs

Target = Literal["supervisor", "learner", "actor", "engine"]
Kind = Literal["kill", "stop", "stop and continue"]
TARGETS: tuple[Target, ...] = ("supervisor", "learner", "actor", "engine")
KINDS: tuple[Kind, ...] = ("kill", "stop")
LOOK_S = 0.2
SUPERVISOR_STOPPED_S = 35.0
"""Longer than a heartbeat may take."""
_QUICK = 0.5
"""Part of the faults that do not wait for a step after the one before: they hit processes that start."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One process to be stopped (SIGSTOP) or killed (SIGKILL)."""

    target: Target
    kind: Kind
    after_steps: int | None
    """Rows of steps to wait for since the fault before; None: `after_s` instead."""
    after_s: float


@dataclasses.dataclass
class Report:
    """What became of a run."""

    injected: dict[str, int] = dataclasses.field(default_factory=dict)
    num_commands: int = 1
    """How often the command was started."""
    num_supervisors_killed: int = 0
    longest_gap_s: float = 0.0
    """Between two rows of metrics, with everything."""
    longest_idle_s: float = 0.0
    """From a row, or a fault after it, to the next: without the time in which a learner or an actor that nobody stopped
    was starting, or in which the supervisor was stopped."""
    seconds: float = 0.0


def draw_faults(seed: int, number: int) -> list[Fault]:
    """Every kind for every target as often, in random order."""
    source = random.Random(seed)
    kinds: list[tuple[Target, Kind]] = []
    while len(kinds) < number:
        kinds.extend(itertools.product(TARGETS, KINDS))
        kinds.append(("supervisor", "stop and continue"))
    kinds = kinds[:number]
    source.shuffle(kinds)
    return [
        Fault(
            target, kind, None if source.random() < _QUICK else source.randint(2, 7), after_s=source.uniform(0.0, 15.0)
        )
        for target, kind in kinds
    ]


class Chaos:
    """A job under faults. A stopped supervisor is killed after a while, as by a user who gives up, or continued."""

    def __init__(self, folder: Path, fields: Mapping[str, object], *, config: str) -> None:
        """Nothing is started; the commands' output goes to `<folder>.log`."""
        self._folder, self._fields, self._config = folder, fields, config
        self.log = folder.with_suffix(".log")
        self.report = Report()
        self._seen = (0, 0)
        """The metrics file's inode and size."""
        self._num_rows = 0
        self._gap_s = self._idle_s = 0.0
        self._looked_s = time.monotonic()

    def run(self, faults: list[Fault], *, deadline_s: float) -> Report:
        """Runs the job to its end, the faults on the way; fails if it doesn't end by itself."""
        start_s = time.monotonic()
        with open(self.log, "a") as output:
            self._output: IO[str] = output
            self._start()
            try:
                for fault in faults:
                    self._wait(fault, deadline_s=deadline_s)
                    self._inject(fault)
                while self.job.process.poll() is None:
                    self._look()
                    assert time.monotonic() - start_s < deadline_s, f"no end in {deadline_s} s\n{self.job.logs()}"
                assert self.job.process.returncode == 0, f"{self.log.read_text()[-3000:]}\n{self.job.logs()}"
            finally:
                self.job.end()
        self.report.seconds = time.monotonic() - start_s
        return self.report

    def _start(self) -> None:
        self.job = jobs.start_command(self._folder, self._fields, config=self._config, output=self._output)

    def _wait(self, fault: Fault, *, deadline_s: float) -> None:
        rows, start_s = self._num_rows, time.monotonic()
        while (
            self._num_rows < rows + fault.after_steps
            if fault.after_steps is not None
            else time.monotonic() - start_s < fault.after_s
        ):
            self._look()
            assert self.job.process.poll() is None, f"the job ended\n{self.log.read_text()[-3000:]}\n{self.job.logs()}"
            assert time.monotonic() - start_s < deadline_s, f"no progress\n{self.job.logs()}"

    def _inject(self, fault: Fault) -> None:
        pid = self.job.process.pid
        while fault.target != "supervisor" and (found := self._find().get(fault.target)) is None:
            self._look()
            assert self.job.process.poll() is None, f"the job ended\n{self.job.logs()}"
        if fault.target != "supervisor":
            pid = found
        name = f"{fault.target}: {fault.kind}"
        self.report.injected[name] = self.report.injected.get(name, 0) + 1
        self._output.write(
            f"--- {name} (pid {pid}); until now rows={self._num_rows} longest_gap_s={self.report.longest_gap_s:.0f} "
            f"longest_idle_s={self.report.longest_idle_s:.0f}\n"
        )
        self._output.flush()
        self._idle_s = 0.0
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.target == "supervisor":
            self._after_supervisor(fault)

    def _after_supervisor(self, fault: Fault) -> None:
        if fault.kind != "kill":
            before = self._healthy()
            end_s = time.monotonic() + SUPERVISOR_STOPPED_S
            while time.monotonic() < end_s:
                self._look()
            if fault.kind == "stop and continue":
                self.job.process.send_signal(signal.SIGCONT)
                for _ in range(int(5 / LOOK_S)):
                    self._look()
                now = self._find()
                assert {r: now.get(r) for r in before} == before, f"healthy processes were replaced: {before}, {now}"
                self._output.write("--- supervisor: continued\n")
                return
            self.job.process.kill()
        self.job.process.wait()
        self.report.num_supervisors_killed += 1
        self.report.num_commands += 1
        self._start()

    def _find(self) -> dict[str, int]:
        """Target -> process, of those there are now."""
        found: dict[str, int] = {}
        for pid in jobs.descendants(self.job.process.pid):
            line = _command_line(pid)
            if "launch.learner" in line:
                found["learner"] = pid
            elif "launch.actor" in line:
                found["actor"] = pid
            elif "EngineCore" in line or "spawn_main" in line:
                found["engine"] = pid
        return found

    def _healthy(self) -> dict[str, int]:
        """The learner and the actor, so far as all of theirs is there and nothing is stopped."""
        found = self._find()
        roles = {"learner": ["learner"], "actor": ["actor", "engine"]}
        return {
            role: found[role]
            for role, parts in roles.items()
            if all(p in found and jobs.state(found[p]) not in ("T", "Z") for p in parts)
        }

    def _look(self) -> None:
        """Waits for a moment and keeps the books of what the run does."""
        time.sleep(LOOK_S)
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        file = self._folder / "metrics.jsonl"
        seen = (file.stat().st_ino, file.stat().st_size) if file.is_file() else (0, 0)
        before, self._seen = self._seen, seen
        # Another file under the name is what a restarted learner has left of the one before: no progress.
        if seen[1] > 0 and (before[0] == 0 or (seen[0] == before[0] and seen[1] > before[1])):
            self._num_rows += 1
            self._gap_s = self._idle_s = 0.0
            return
        self._gap_s += passed_s
        if not (self._is_starting() or jobs.state(self.job.process.pid) == "T"):
            self._idle_s += passed_s
        self.report.longest_gap_s = max(self.report.longest_gap_s, self._gap_s)
        self.report.longest_idle_s = max(self.report.longest_idle_s, self._idle_s)

    def _is_starting(self) -> bool:
        """Whether a learner or an actor that nobody stopped has not come to its work yet."""
        found = self._find()
        if any(jobs.state(pid) == "T" for pid in found.values()):
            return False
        if not {"learner", "actor"} <= found.keys():
            return True
        try:
            ready = {b.pid for b in self.job.heartbeats() if b.role == "learner" or b.report is not None}
        except (StoreBusyError, OSError):
            return False
        return not {found["learner"], found["actor"]} <= ready


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
