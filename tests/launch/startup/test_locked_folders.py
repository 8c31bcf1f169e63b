"""Who removes what actors keep in the cache: over real processes, some of them killed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.startup.locked_folders import LEFT_S, ActorWorkFolder
from tests.integration.support.processes import piped

HOLD = """
import sys, pathlib
from launch.startup.locked_folders import ModelFolderLock, ActorWorkFolder
root = pathlib.Path(sys.argv[1])
work = ActorWorkFolder(root / "actors" / sys.argv[2], sys.argv[2], is_ours=True)
(work.path / "events").mkdir()
(work.path / "events" / "log").write_text("x")
model = ModelFolderLock(root / "models" / sys.argv[3])
(root / "models" / sys.argv[3]).mkdir(exist_ok=True)
(root / "models" / sys.argv[3] / "config.json").write_text("{}")
print("held", flush=True)
sys.stdin.read()
work.is_done = True
model.close()
work.close()
"""


def hold(root: Path, name: str, model: str) -> subprocess.Popen[str]:
    process = piped(HOLD, root, name, model)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def make_older(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        when = path.stat().st_mtime - 2 * LEFT_S
        os.utime(path, (when, when))


def there(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for kind in ("actors", "models") for p in (root / kind).glob("*")}


def test_actor_that_ends_removes_its_own_and_the_last_one_what_they_share(tmp_path):
    first, second = hold(tmp_path, "a", "m"), hold(tmp_path, "b", "m")
    assert there(tmp_path) == {"actors/a", "actors/b", "models/m", "models/m.users"}
    first.communicate()
    assert there(tmp_path) == {"actors/b", "models/m", "models/m.users"}
    second.communicate()
    assert there(tmp_path) == set()


def test_what_a_killed_actor_left_is_removed_by_the_next_one_and_a_live_ones_is_not(tmp_path):
    dead, live = hold(tmp_path, "dead", "old"), hold(tmp_path, "live", "m")
    kill(dead)
    for name in ("dead", "live"):
        make_older(tmp_path / "actors" / name)
    hold(tmp_path, "next", "m").communicate()
    assert there(tmp_path) == {"actors/live", "models/m", "models/m.users"}
    live.communicate()


def test_what_a_killed_actor_left_a_moment_ago_waits_for_it_to_be_started_again(tmp_path):
    kill(hold(tmp_path, "a", "m"))
    ActorWorkFolder(tmp_path / "actors" / "b", "b", is_ours=True).close()
    again = ActorWorkFolder(tmp_path / "actors" / "a", "a", is_ours=True)
    assert (again.path / "events" / "log").exists()
    again.close()  # not done: to be resized, or it failed
    assert (again.path / "events" / "log").exists()


def test_work_folder_of_the_users_own_stays_and_so_does_what_is_beside_it(tmp_path):
    (tmp_path / "mine").mkdir()
    make_older(tmp_path / "mine")
    own = ActorWorkFolder(tmp_path / "work", "a", is_ours=False)
    own.is_done = True
    own.close()
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "work"}


def test_folder_without_a_lock_is_nobodys_to_remove(tmp_path):
    foreign = [tmp_path / "actors" / "x", tmp_path / "models" / "x"]
    for folder in foreign:
        folder.mkdir(parents=True)
        make_older(folder)
    hold(tmp_path, "a", "m").communicate()
    assert all(folder.exists() for folder in foreign)


@pytest.mark.heavy
def test_live_actors_name_is_refused(tmp_path):
    live = hold(tmp_path, "a", "m")
    with pytest.raises(ValueError, match="used by a live actor a; set another --name"):
        ActorWorkFolder(tmp_path / "actors" / "a", "a", is_ours=True)
    live.communicate()
