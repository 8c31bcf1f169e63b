import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from actor.weights import source
from actor.weights.source import LocalCopy
from tests.integration.support.processes import piped

HOLD = """
import sys, pathlib
from actor.weights.source import LocalCopy
copy = LocalCopy(pathlib.Path(sys.argv[1]), sys.argv[2])
copy.file.write_bytes(b"x")
print("held", flush=True)
sys.stdin.read()
"""


def hold(snapshots: Path, actor: str) -> subprocess.Popen:
    process = piped(HOLD, snapshots, actor)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_close_removes_the_folder(tmp_path):
    copy = LocalCopy(tmp_path / "run", "actor-0")
    copy.file.write_bytes(b"x")
    assert copy.file.parent.parent == tmp_path
    copy.close()
    copy.close()
    assert list(tmp_path.iterdir()) == []


def test_copy_of_a_live_actor_is_left_alone_and_its_name_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_PATIENCE_S", 0.0)
    other = hold(tmp_path / "run", "actor-0")
    try:
        with pytest.raises(ValueError, match="locked by a live process with the name actor-0"):
            LocalCopy(tmp_path / "run", "actor-0")
        LocalCopy(tmp_path / "run", "actor-1").close()
        assert (tmp_path / "run.copy-actor-0" / "weights").exists()
    finally:
        other.communicate()


def test_copy_of_a_killed_actor_is_removed_by_the_next_one(tmp_path):
    other = hold(tmp_path / "run", "actor-0")
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert (tmp_path / "run.copy-actor-0").exists()
    copy = LocalCopy(tmp_path / "run", "actor-0-r1")
    assert [p.name for p in tmp_path.iterdir()] == ["run.copy-actor-0-r1"]
    copy.close()


def test_own_copy_that_another_starting_actor_is_removing_is_waited_for(tmp_path, monkeypatch):
    folder = tmp_path / "run.copy-actor-0"
    folder.mkdir()
    sweeping = source._lock(folder)
    assert sweeping is not None

    def swept(seconds: float) -> None:
        shutil.rmtree(folder)
        os.close(sweeping)

    monkeypatch.setattr(source.time, "sleep", swept)
    copy = LocalCopy(tmp_path / "run", "actor-0")
    assert copy.file.parent == folder and folder.exists()
    copy.close()


def test_copies_of_another_run_are_left_alone(tmp_path):
    (tmp_path / "other.copy-actor-0").mkdir()
    LocalCopy(tmp_path / "run", "actor-0").close()
    assert (tmp_path / "other.copy-actor-0").exists()
