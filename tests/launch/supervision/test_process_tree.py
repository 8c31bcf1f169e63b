"""Real processes: what dies with its parent, and what is found by its mark."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.supervision import process_tree
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import REPO, python, wait_until

STATE = "import sys; sys.stdin.read()"
WITH_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STATE!r}])
print(child.pid, flush=True)
child.wait()
"""
LARGE = f"import os; held = bytearray(512 << 20); print(os.getpid(), flush=True); {STATE}"
WITHOUT_ITS_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""
WITH_A_LARGE_CHILD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {LARGE!r}]).wait()
"""
STOPPED_CHILD = """
import os, signal
from launch.supervision.process_tree import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = f"""
import os, subprocess, sys
from launch.supervision import process_tree
child = subprocess.Popen([sys.executable, "-c", {STOPPED_CHILD!r}], env=os.environ | process_tree.environment("m:x"))
child.wait()
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def start(code: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)} | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.fixture
def waiting():
    """`waiting(mark)` starts a process with that mark (or none) that does nothing until it is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def call(mark: str = "", code: str = STATE) -> subprocess.Popen[bytes]:
        started.append(start(code, **({process_tree.RUN_TAG: mark} if mark else {})))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_die_with_parent_stopped_child_ends_with_its_killed_parent(waiting):
    parent = waiting(code=PARENT)
    child = int(parent.stdout.readline())
    try:
        wait_until(lambda: state(child) == "T", "the child is stopped")
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_alive(child), "the child's end", deadline_s=60)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_die_with_parent_whose_parent_is_gone_already_ends_at_once():
    code = "import launch.supervision.process_tree as l; l.die_with_parent(); print('lived')"
    done = python("-c", code, env={process_tree.VARIABLE: "1"})  # not ours
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_end_marked_kills_those_with_the_mark_stopped_or_not_and_no_others(waiting):
    ours, stopped = waiting("run-1:learner"), waiting("run-1:actor-0")
    others = [waiting("run-10:learner"), waiting("run-2:actor-0"), waiting()]
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: state(stopped.pid) == "T", "one is stopped")
    ended = process_tree.kill_leftovers(lambda mark: mark.startswith("run-1:"))
    assert {(e.pid, e.mark) for e in ended} == {(ours.pid, "run-1:learner"), (stopped.pid, "run-1:actor-0")}
    assert ours.wait(20) == stopped.wait(20) == -signal.SIGKILL
    assert [p.poll() for p in others] == [None] * 3
    assert process_tree.kill_leftovers(lambda mark: mark.startswith("run-1:")) == []


def test_end_marked_finds_what_a_marked_process_started(waiting):
    parent = waiting("run-1:actor-0", WITH_A_CHILD)
    grandchild = int(parent.stdout.readline())
    assert {e.pid for e in process_tree.kill_leftovers(lambda mark: mark == "run-1:actor-0")} == {
        parent.pid,
        grandchild,
    }
    assert not is_alive(grandchild)


def test_end_group_ends_what_an_ended_process_left_and_returns_when_none_lives(waiting):
    leader, other = waiting(code=WITH_A_LARGE_CHILD), waiting()
    left = int(leader.stdout.readline())  # it takes a while to give back its memory
    leader.kill()
    leader.wait()
    assert is_alive(left)
    process_tree.end_group(leader.pid)
    assert not is_alive(left) and other.poll() is None
    process_tree.end_group(leader.pid)  # nothing left


def test_end_group_waits_for_a_process_whose_first_thread_has_ended(waiting, monkeypatch):
    monkeypatch.setattr(process_tree.os, "killpg", lambda *_: None)  # which may end it before we look
    process = waiting(code=WITHOUT_ITS_FIRST_THREAD)
    wait_until(lambda: state(process.pid) == "Z", "its first thread's end")
    ends = select.poll()
    held = os.pidfd_open(process.pid)
    ends.register(held, select.POLLIN)
    assert not ends.poll(0)
    process_tree.end_group(process.pid)
    assert ends.poll(0)
    os.close(held)


def test_end_group_of_what_does_not_end_says_which(waiting, monkeypatch):
    process = waiting()
    monkeypatch.setattr(process_tree.os, "killpg", lambda *_: None)
    monkeypatch.setattr(process_tree.signal, "pidfd_send_signal", lambda *_: None)
    with pytest.raises(TimeoutError, match=rf"process {process.pid} \(python.*\) did not exit after SIGKILL"):
        process_tree.end_group(process.pid, deadline_s=0.0)


def test_end_group_is_not_disturbed_by_a_process_with_an_odd_name(tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (caf\xc3) S 1 9 9" + b" 0" * 40)
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    assert process_tree._living_group(7) == 9
    process_tree.end_group(2**22 + 1)  # no process has this number


def test_mark_of_a_process_in_its_exec_is_read_once_the_kernel_shows_it(tmp_path, monkeypatch):
    entry = tmp_path / "7"
    entry.mkdir()
    (entry / "environ").touch()
    (entry / "cmdline").touch()
    (entry / "exe").symlink_to(sys.executable)
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)

    def exec_ends(_: float) -> None:
        (entry / "environ").write_bytes(f"A=b\0{process_tree.RUN_TAG}=run-1:learner\0".encode())

    monkeypatch.setattr(process_tree.time, "sleep", exec_ends)
    assert [m.mark for m in process_tree._marked()] == ["run-1:learner"]


@pytest.mark.parametrize("cmdline", [b"", b"program\0"], ids=["the kernel's own", "an empty environment"])
def test_mark_of_a_process_without_an_environment_is_not_waited_for(tmp_path, monkeypatch, cmdline):
    entry = tmp_path / "7"
    entry.mkdir()
    (entry / "environ").touch()
    (entry / "cmdline").write_bytes(cmdline)
    if cmdline:
        (entry / "exe").symlink_to(sys.executable)
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    monkeypatch.setattr(process_tree.time, "sleep", lambda _: pytest.fail("waited"))
    assert list(process_tree._marked()) == []


def test_end_marked_another_process_that_got_the_id_meanwhile_lives(waiting, monkeypatch):
    innocent = waiting()
    # What was found under its id had our mark a moment ago.
    monkeypatch.setattr(
        process_tree, "_marked", iter_once([process_tree.TaggedProcess(innocent.pid, "run-1:learner", "python")])
    )
    process_tree.kill_leftovers(lambda mark: mark.startswith("run-1:"), deadline_s=0.1)
    assert innocent.poll() is None


def iter_once(found: list[process_tree.TaggedProcess]):
    rounds = [found]
    return lambda: iter(rounds.pop() if rounds else [])


def test_stopped_below_sees_stopped_descendants_only(waiting):
    parent, other = waiting("run-1:a", WITH_A_CHILD), waiting()
    grandchild = int(parent.stdout.readline())
    assert process_tree.stopped_below(parent.pid) == set()
    for pid in (grandchild, other.pid):
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: state(pid) == "T", "it is stopped")
    assert process_tree.stopped_below(os.getpid()) >= {grandchild, other.pid}
    assert process_tree.stopped_below(parent.pid) == {grandchild}
    process_tree.kill_below(other.pid, parent.pid)  # not below it
    process_tree.kill_below(grandchild, parent.pid)
    assert parent.wait(20) == 0 and is_alive(other.pid)


def test_descendants_of_a_process_that_ends_while_it_is_looked_at_are_those_of_the_others(waiting, monkeypatch):
    parent = waiting("run-1:a", WITH_A_CHILD)
    grandchild, ending = int(parent.stdout.readline()), waiting()

    def without_the_ending_one(real):
        def look(path, *args):
            if str(path) == f"/proc/{ending.pid}/task":
                raise FileNotFoundError(path)
            return real(path, *args)

        return look

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, without_the_ending_one(getattr(os, name)))
    assert process_tree.descendants(os.getpid()) >= {parent.pid, grandchild, ending.pid}
