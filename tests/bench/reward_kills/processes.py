"""The run's processes, found from outside by the kernel's tables."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

from launch.supervision.process_tree import descendants

_PROC = pathlib.Path("/proc")
_WORKER, _ZYGOTE = b"actor.rewards.verifier_worker", b"actor.environments.fork_server"

Life = tuple[int, int]
"""A process: its id, and the clock ticks at which it began, since ids come again."""


def find(run: int) -> dict[str, list[int]]:
    """Verifier workers, zygotes and episodes' processes below the run's command."""
    below = {pid: _command(pid) for pid in descendants(run)}
    zygotes = {pid for pid, command in below.items() if _ZYGOTE in command}
    forked = {pid for pid in zygotes if _parent(pid) in zygotes}
    return {
        "worker": sorted(pid for pid, command in below.items() if _WORKER in command),
        "zygote": sorted(zygotes - forked),
        "episode": sorted(forked),
    }


def lives(run: int) -> set[Life]:
    """All that are below the run's command now."""
    return {(pid, began) for pid in descendants(run) if (began := _began(pid)) is not None}


def alive(of: set[Life]) -> set[Life]:
    """Those that still run; a zombie doesn't."""
    return {(pid, began) for pid, began in of if _began(pid) == began and _state(pid) != "Z"}


def send(pid: int, number: signal.Signals, *, below: int) -> bool:
    """Signals a process if it still is one below another: held by a descriptor meanwhile, so that it is no stranger."""
    with contextlib.suppress(ProcessLookupError):
        held = os.pidfd_open(pid)
        try:
            if pid in descendants(below):
                signal.pidfd_send_signal(held, number)
                return True
        finally:
            os.close(held)
    return False


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes()
    return b""


def _fields(pid: int) -> Iterator[str]:
    """Of /proc/PID/stat, from the state on."""
    with contextlib.suppress(OSError):
        yield from (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()


def _state(pid: int) -> str:
    return next(_fields(pid), "")


def _parent(pid: int) -> int:
    return int([*_fields(pid), "", "0"][1] or 0)


def _began(pid: int) -> int | None:
    fields = [*_fields(pid)]
    return int(fields[19]) if fields else None


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped it."""
    return _state(pid) == "T"
