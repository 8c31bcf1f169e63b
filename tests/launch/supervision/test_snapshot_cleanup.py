"""Weight snapshots after their supervisor died, in real processes."""

import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from bridge.files import RunLock
from configs.run_folder import RunFolder
from launch.supervision.snapshot_cleanup import CleanupProcess
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import piped, wait_until

SUPERVISOR = """
import pathlib, sys
from bridge.files import RunLock
from configs.run_folder import RunFolder
from launch.supervision.snapshot_cleanup import CleanupProcess
folder, snapshots = map(pathlib.Path, sys.argv[1:])
lock = RunLock(RunFolder(folder).supervisor_lock, "launch.local")
print(CleanupProcess(folder, snapshots).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path) -> tuple[RunFolder, pathlib.Path]:
    """A run's folder, and its snapshots with one actor's copy."""
    run, snapshots = RunFolder(tmp_path / "run"), tmp_path / "memory" / "sluice-run-1"
    run.path.mkdir()
    for folder in (snapshots, snapshots.with_name("sluice-run-1.copy-actor-0")):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "weights").write_bytes(b"w")
    return run, snapshots


@pytest.fixture
def supervisor(place) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A supervisor, and the process id of its cleanup."""
    run, snapshots = place
    process = piped(SUPERVISOR, run.path, snapshots)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        yield process, pid
    finally:
        process.kill()
        process.communicate()
        wait_until(lambda: not is_alive(pid), "the cleanup has exited")


@pytest.mark.heavy
def test_snapshots_of_a_killed_supervisor_are_removed_from_memory(place, supervisor):
    _, snapshots = place
    process, pid = supervisor
    assert snapshots.is_dir() and is_alive(pid)
    process.kill()
    wait_until(lambda: not any(snapshots.parent.iterdir()), "memory is free")


@pytest.mark.heavy
def test_snapshots_stay_until_the_learner_of_a_killed_supervisor_has_exited(place, supervisor):
    run, snapshots = place
    process, pid = supervisor
    learner = RunLock(run.learner_lock, "learner")
    process.kill()
    process.wait()
    wait_until(lambda: can_lock(run), "the supervisor's lock is free")
    assert snapshots.is_dir() and is_alive(pid)
    learner.release()
    wait_until(lambda: not snapshots.exists(), "memory is free")


def can_lock(run: RunFolder) -> bool:
    try:
        RunLock(run.supervisor_lock, "test").release()
    except ValueError:
        return False
    return True


@pytest.mark.heavy
def test_closed_cleanup_exits_and_leaves_everything(place):
    run, snapshots = place
    cleanup = CleanupProcess(run.path, snapshots)
    cleanup.close()
    assert not is_alive(cleanup.pid) and (snapshots / "weights").exists()
    assert len(list(snapshots.parent.iterdir())) == 2
