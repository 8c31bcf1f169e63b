"""Process trees: parent-death signal, marks, search and kill."""

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from bridge import processes

_USAGE_ERROR = 2


def arguments(argv: Sequence[str], wanted: str, *, command: str) -> list[str]:
    """Returns the positional arguments of an internal process, whose names are the words of `wanted`.

    Exits with 2 and one line on other arguments: the process was started by hand, instead of the public `command`.
    """
    given = list(argv[1:])
    if len(given) != len(wanted.split()) or any(one.startswith("-") for one in given):
        refuse(command, f"expected {wanted}, got {' '.join(given) or 'no arguments'}")
    return given


def refuse(command: str, why: str) -> NoReturn:
    """Exits with 2 and one line on stderr."""
    print(f"error: internal process: {why}; run {command} instead", file=sys.stderr)
    sys.exit(_USAGE_ERROR)


VARIABLE = "SLUICE_PARENT_PID"
"""Set by a parent whose children must not outlive it."""
RUN_TAG = "SLUICE_MARK"
"""Set by a parent that must find its children and their descendants again."""
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Stops setproctitle, which vLLM uses, from overwriting the environment that the kernel shows."""
_PROC = pathlib.Path("/proc")
_GROUP, _NUM_THREADS = 2, 17
"""Indices in the fields of `_stat`."""
EXIT_S = 120.0
"""Timeout for killed processes to exit, in seconds. The kernel releases large memory slowly on busy cores."""
_EXEC_S = 5.0
"""Timeout in seconds for a process to show its environment after exec; usually microseconds, more on busy cores."""


def die_with_parent() -> None:
    """Asks the kernel to SIGKILL this process when the parent named in the environment exits (Linux).

    A suspended or stuck process handles no other signal.
    """
    parent = os.environ.get(VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    processes.die_with_parent(int(parent))


def environment(mark: str) -> dict[str, str]:
    """Returns the environment with which a child dies with this process and carries `mark`."""
    return {VARIABLE: str(os.getpid()), RUN_TAG: mark, _KEEP_ENVIRONMENT: "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedProcess:
    """A process that carries a mark."""

    pid: int
    mark: str
    title: str


def kill_leftovers(is_ours: Callable[[str], bool], *, deadline_s: float = EXIT_S) -> list[TaggedProcess]:
    """Kills every process whose mark is ours, waits until all have exited, and returns them.

    The mark is in the process's initial environment, as shown by the kernel. It is read again after opening a pidfd, so
    a process that has reused the id is never killed. Raises TimeoutError if one is alive after `deadline_s`.
    """
    ended: list[TaggedProcess] = []

    def ours() -> list[int]:
        found = [m for m in _marked() if is_ours(m.mark)]
        ended.extend(m for m in found if m not in ended)
        return [m.pid for m in found]

    _end_all(ours, lambda pid: is_ours(_mark_of(pid)), deadline_s)
    return ended


def end_group(group: int, *, deadline_s: float = EXIT_S) -> None:
    """Kills every process of a process group and waits until all have exited, regardless of their parent.

    Raises TimeoutError if one is still alive after `deadline_s`.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # reaches all members together, and needs no file descriptors

    def is_of_it(pid: int) -> bool:
        return _living_group(pid) == group

    _end_all(lambda: [pid for pid in _pids() if is_of_it(pid)], is_of_it, deadline_s)


def stopped_below(pid: int) -> set[int]:
    """Returns the descendants of a process that are suspended by a signal."""
    return {p for p in descendants(pid) if _state(p) == "T"}


def kill_below(pid: int, below: int) -> None:
    """Kills `pid` if it is a descendant of `below`."""
    _kill([pid], lambda pid: pid in descendants(below), wait_s=0.0)


def descendants(pid: int) -> set[int]:
    """Returns all descendants of a process."""
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
    while found := find():  # repeated, because a process may have started another
        left = _kill(found, is_it, wait_s=end_s - time.monotonic())
        if time.monotonic() > end_s:
            pid = (left or found)[0]
            raise TimeoutError(f"process {pid} ({_title(pid)}) did not exit after SIGKILL")


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _marked() -> Iterator[TaggedProcess]:
    for pid in _pids():
        if pid != os.getpid() and (mark := _mark_of(pid)):
            yield TaggedProcess(pid, mark, _title(pid))


def _mark_of(pid: int) -> str:
    """Returns a live process's mark; empty if it has none, belongs to another user, or is gone."""
    head = f"{RUN_TAG}=".encode()
    entry = _PROC / str(pid)
    end_s = time.monotonic() + _EXEC_S
    try:
        while not (shown := (entry / "environ").read_bytes()) and _is_in_exec(entry) and time.monotonic() < end_s:
            time.sleep(0.001)
    except OSError:
        return ""
    return next((os.fsdecode(e.removeprefix(head)) for e in shown.split(b"\0") if e.startswith(head)), "")


def _is_in_exec(entry: pathlib.Path) -> bool:
    """Returns True if a process is between exec and its arguments; the kernel shows its environment after them."""
    return not (entry / "cmdline").read_bytes() and bool(os.readlink(entry / "exe"))  # kernel threads have no program


def _title(pid: int) -> str:
    try:
        return os.fsdecode((_PROC / str(pid) / "comm").read_bytes()).strip()
    except OSError:
        return "gone"


def _state(pid: int) -> str:
    """Returns the state letter of a process (T: suspended by a signal, Z: zombie, ...); empty if it is gone."""
    found = _stat(pid)
    return found[0] if found else ""


def _living_group(pid: int) -> int | None:
    """Returns the process group; None if the process has exited. It lives while any thread does."""
    found = _stat(pid)
    if not found or (found[0] in {"Z", "X"} and int(found[_NUM_THREADS]) <= 1):
        return None
    return int(found[_GROUP])


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on (proc_pid_stat); empty if the process is gone."""
    try:
        return os.fsdecode((_PROC / str(pid) / "stat").read_bytes()).rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _kill(pids: list[int], is_it: Callable[[int], bool], *, wait_s: float) -> list[int]:
    """Kills the processes that still satisfy `is_it` once held by a pidfd; returns those alive after the wait."""
    with contextlib.ExitStack() as held:
        left: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                held.callback(os.close, descriptor)
                if is_it(pid):
                    left[descriptor] = pid
                    with contextlib.suppress(PermissionError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ends = select.poll()
        for descriptor in left:
            ends.register(descriptor, select.POLLIN)
        end_s = time.monotonic() + wait_s
        while left and (ended := ends.poll(max(0.0, end_s - time.monotonic()) * 1000)):
            for descriptor, _ in ended:
                ends.unregister(descriptor)
                del left[descriptor]
        return list(left.values())
