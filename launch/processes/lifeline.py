"""What we start ends with us, whatever we or it die of, and what outlived a killed start is found again."""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1
VARIABLE = "SLUICE_PARENT_PID"
"""Set by a parent whose children must not outlive it."""
MARK = "SLUICE_MARK"
"""Set by a parent that wants to find its children, and all that they start, again."""
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""setproctitle, which names vLLM's processes, writes over the environment that the kernel shows, unless this is set."""
_PROC = pathlib.Path("/proc")
_EXEC_S = 5.0
"""Longest a process is waited for that is about to show its environment: microseconds, more where cores are busy."""


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the parent named in the environment is gone (Linux).

    By SIGKILL: one that is stopped, or stuck, handles no other signal.
    """
    parent = os.environ.get(VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def environment(mark: str) -> dict[str, str]:
    """What a child finds in its environment so that it dies with this process, and is `marked`."""
    return {VARIABLE: str(os.getpid()), MARK: mark, _KEEP_ENVIRONMENT: "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class Marked:
    """A process with our mark."""

    pid: int
    mark: str
    title: str


def end_marked(is_ours: Callable[[str], bool], *, deadline_s: float = 30.0) -> list[Marked]:
    """Kills every process whose mark is ours, waits until they are gone, and returns them.

    The mark is in what the kernel shows of the environment that a process began with. It is read again once the process
    is held by a descriptor, so that another one which got its id meanwhile is never killed.

    Raises:
      TimeoutError: one is still there after `deadline_s`.
    """
    ended: list[Marked] = []

    def ours() -> list[int]:
        found = [m for m in _marked() if is_ours(m.mark)]
        ended.extend(m for m in found if m not in ended)
        return [m.pid for m in found]

    _end_all(ours, lambda pid: is_ours(_mark_of(pid)), deadline_s)
    return ended


def end_group(group: int, *, deadline_s: float = 30.0) -> None:
    """Kills every process of a process group and waits until none lives, whoever their parent is.

    Raises:
      TimeoutError: one is still there after `deadline_s`.
    """
    _end_all(
        lambda: [p for p in _pids() if _living_group(p) == group], lambda pid: _living_group(pid) == group, deadline_s
    )


def stopped_below(pid: int) -> set[int]:
    """The processes below one that a signal stopped, and nobody has continued."""
    return {p for p in descendants(pid) if _state(p) == "T"}


def kill_below(pid: int, below: int) -> None:
    """Kills `pid`, if it is a process below `below`."""
    _kill(pid, lambda: pid in descendants(below), wait_s=0.0)


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    front = [pid]
    while front:
        tasks = _PROC / str(front.pop()) / "task"
        try:
            threads = os.listdir(tasks)
        except OSError:  # the process has ended
            continue
        for thread in threads:
            with contextlib.suppress(OSError):  # the thread has ended
                new = [int(p) for p in (tasks / thread / "children").read_text().split()]
                found.update(new)
                front += new
    return found


def _end_all(find: Callable[[], list[int]], is_it: Callable[[int], bool], deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while found := find():  # again: one may have started another meanwhile
        for pid in found:
            _kill(pid, lambda pid=pid: is_it(pid), wait_s=end_s - time.monotonic())
        if time.monotonic() > end_s:
            raise TimeoutError(f"process {found[0]} ({_title(found[0])}) was killed and does not end")


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _marked() -> Iterator[Marked]:
    for pid in _pids():
        if pid != os.getpid() and (mark := _mark_of(pid)):
            yield Marked(pid, mark, _title(pid))


def _mark_of(pid: int) -> str:
    """A live process's mark; empty if it has none, is another user's, or is gone."""
    head = f"{MARK}=".encode()
    entry = _PROC / str(pid)
    end_s = time.monotonic() + _EXEC_S
    try:
        while not (shown := (entry / "environ").read_bytes()) and _is_in_exec(entry) and time.monotonic() < end_s:
            time.sleep(0.001)
    except OSError:
        return ""
    return next((os.fsdecode(e.removeprefix(head)) for e in shown.split(b"\0") if e.startswith(head)), "")


def _is_in_exec(entry: pathlib.Path) -> bool:
    """Whether it has a new program, but no arguments yet: the kernel shows its environment as soon as it has them."""
    return not (entry / "cmdline").read_bytes() and bool(os.readlink(entry / "exe"))  # the kernel's own have no program


def _title(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return "gone"


def _state(pid: int) -> str:
    """R, S, D, T (stopped by a signal), Z, ... ; empty if it is gone."""
    return _status(pid)[0]


def _living_group(pid: int) -> int:
    """Its process group; 0 if it has ended."""
    state, group = _status(pid)
    return 0 if state in {"", "Z", "X"} else int(group)


def _status(pid: int) -> tuple[str, str]:
    """State and process group, as the kernel tells them; a state of "" if it is gone."""
    try:
        state, _, group = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[:3]
    except (OSError, IndexError):
        return "", ""
    return state, group


def _kill(pid: int, is_it: Callable[[], bool], *, wait_s: float) -> None:
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_it():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(held, signal.SIGKILL)
            select.select([held], [], [], max(0.0, wait_s))
    finally:
        os.close(held)
