"""Parent-child process helpers (Linux): exit with the parent, and length-prefixed messages.

A message is its length in four bytes (big-endian), followed by its body.
"""

import ctypes
import os
import signal
import struct

CALLER = "SLUICE_CALLER_PID"
"""Environment variable with the id of the process that started a command and whose end stops it (SIGTERM)."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, signum: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when the thread that started it exits; SIGKILL also ends a hung process.

    If `parent`, the parent's process id, is given and the parent has exited, this process is killed now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a process gracefully: SIGTERM, SIGINT, and SIGHUP unless nohup ignores it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP])]


_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size


def frame(body: bytes, *, max_bytes: int) -> bytes:
    """Returns a message with its length prefix. Raises ValueError if the body exceeds `max_bytes`."""
    if len(body) > max_bytes:
        raise ValueError(f"message to send: expected at most {max_bytes} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, *, max_bytes: int) -> int:
    """Returns the number of bytes after a prefix of `HEAD_BYTES`. Raises ValueError if it exceeds `max_bytes`."""
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"received message: expected at most {max_bytes} bytes, got {length}")
    return length
