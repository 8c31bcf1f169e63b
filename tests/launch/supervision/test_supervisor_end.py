"""Ends of a supervisor: interrupts, hangups, orphans, locks, and its own death."""

import dataclasses
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from bridge.files import RunLock
from configs.run_folder import run_id, snapshot_folder
from launch.supervision import process_tree
from launch.supervision.backend import run_tag
from launch.supervision.placement import Machine
from launch.supervision.supervisor import RunOutcome, Supervisor
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import REPO, wait_until
from tests.launch.supervision.test_supervisor import crew, pids, watch


class Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C, or that hangs up, as soon as it says one of these; `file` is then there."""

    def __init__(self, *lines: str, number: signal.Signals = signal.SIGINT, file: pathlib.Path | None = None) -> None:
        super().__init__()
        self.lines, self.number, self.file = list(lines), number, file

    def write(self, text: str) -> int:
        if self.lines and self.lines[0] in text:
            del self.lines[0]
            signal.raise_signal(self.number)
            if self.file is not None:
                self.file.touch()
        return super().write(text)


def test_second_interrupt_ends_a_learner_that_takes_its_time_at_once(prepared):
    run = prepared(learner=["deaf"], actor=["serve"])
    run = dataclasses.replace(
        run,
        config=dataclasses.replace(
            run.config, supervision=dataclasses.replace(run.config.supervision, shutdown_grace_s=1e9)
        ),
    )
    said = Impatient("no live actor", "press Ctrl-C again")
    ending = Supervisor(run, Console(file=said, width=200), backend=crew(run, Machine(gpus=(), cores=(0,)))).run()
    assert ending is RunOutcome.INTERRUPTED and not said.lines
    assert not any(is_alive(pid) for role in ("learner", "actor-0") for pid in pids(run, role))


@pytest.mark.parametrize(("handler", "is_left"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)])
def test_hangup_stops_a_run_but_for_one_that_nohup_started(prepared, handler, is_left):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        run = prepared(learner=["until said"], actor=["serve"])
        snapshot_folder(run.config).mkdir(parents=True)
        said = Impatient("no live actor", number=signal.SIGHUP, file=run.folder / "said")
        ending = Supervisor(run, Console(file=said, width=200), backend=crew(run, Machine(gpus=(), cores=(0,)))).run()
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not said.lines and ending is (RunOutcome.DONE if is_left else RunOutcome.INTERRUPTED)
    assert not snapshot_folder(run.config).exists()


def start_marked(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env=os.environ | {process_tree.RUN_TAG: mark},
    )


def test_orphans_of_this_run_are_ended_before_its_processes_start_and_no_others(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    orphan, bystander = start_marked(f"{run_tag(run.folder)}actor-0"), start_marked("another:actor-0")
    try:
        orphan.send_signal(signal.SIGSTOP)
        ending, said, _ = watch(run)
        assert ending is RunOutcome.DONE
        assert orphan.wait(20) == -signal.SIGKILL and bystander.poll() is None
        assert f"killed process {orphan.pid} (" in said and "of actor-0, left by an earlier start of this run" in said
    finally:
        for process in (orphan, bystander):
            process.kill()
            process.communicate()


def test_start_of_a_copied_folder_leaves_the_live_originals_processes_and_snapshots(prepared, tmp_path):
    copy = prepared(learner=["end"], actor=["serve"])
    original = tmp_path / "original"
    shutil.copytree(copy.folder, original)
    assert run_id(original) == run_id(copy.folder)
    snapshots = snapshot_folder(copy.config)
    snapshots.mkdir(parents=True)
    writer = RunLock(snapshots / "writer", "learner")  # the original's, which publishes there
    child = start_marked(f"{run_tag(original)}learner")
    try:
        assert watch(copy)[0] is RunOutcome.DONE
        assert child.poll() is None and snapshots.is_dir()
    finally:
        writer.release()
        child.kill()
        child.communicate()
    Supervisor(copy, Console(file=io.StringIO()))._stop()
    assert not snapshots.exists()  # a dead writer's are removed


def test_second_supervisor_is_refused_and_ends_nothing_of_the_first(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    child = start_marked(f"{run_tag(run.folder)}learner")
    first = Supervisor(run, Console(file=io.StringIO()))
    try:
        with pytest.raises(ValueError, match="is locked by a running launch.local"):
            Supervisor(run, Console(file=io.StringIO()))
        assert child.poll() is None
    finally:
        first._lock.release()
        child.kill()
        child.communicate()


def test_log_that_can_not_be_written_is_one_line(prepared):
    run = prepared(learner=["end"], actor=["serve"])
    (run.folder / "logs").write_text("")
    ending, _, one = watch(run)
    assert ending is RunOutcome.FAILED and one.last_error == f"{run.folder.resolve() / 'logs'}: File exists"


KILLED_SUPERVISOR = """
import io, sys, pathlib, json
from rich.console import Console
from launch.supervision.child import Child
from launch.startup.prepare_run import open_prepared
from launch.supervision.supervisor import Supervisor
folder = sys.argv[1]
Child.command = lambda self: [sys.executable, "-m", "tests.launch.fake_role", self.role, folder]
Supervisor(open_prepared(folder), Console(file=io.StringIO())).run()
"""


@pytest.mark.heavy
def test_killed_supervisor_takes_stopped_children_along(prepared):
    run = prepared(learner=["serve"], actor=["serve"])
    (run.folder / "model_path.txt").write_text("model\n")
    one = subprocess.Popen(
        [sys.executable, "-c", KILLED_SUPERVISOR, str(run.folder)], cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}
    )
    try:
        started = [run.folder / f"{role}.pids" for role in ("learner", "actor-0")]
        wait_until(lambda: all(p.is_file() and p.read_text().endswith("\n") for p in started), "both run")
        children = [*pids(run, "learner"), *pids(run, "actor-0")]
        for child in children:
            os.kill(child, signal.SIGSTOP)
    finally:
        one.kill()
        one.wait()
    try:
        wait_until(lambda: not any(map(is_alive, children)), "the children's end", deadline_s=60)
    finally:
        process_tree.kill_leftovers(lambda mark: mark.startswith(run_tag(run.folder)))
