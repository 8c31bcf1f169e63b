"""A child process and its parent (Linux): the tie between them, and the messages of a byte stream.

A message is four bytes of length (big-endian), then the message.
"""

import ctypes
import os
import signal
import struct

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, signum: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when the thread that started it ends.

    SIGKILL also ends a process that is stopped or hung.

    Args:
      parent: id of the parent; if it has ended already, this process is killed now. None: not looked at.
      signum: the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size


def frame(body: bytes, *, max_bytes: int) -> bytes:
    """Returns a message as it is sent.

    Raises:
      ValueError: it is too large.
    """
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes, at most {max_bytes} may be sent")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, *, max_bytes: int) -> int:
    """Returns how many bytes follow the `HEAD_BYTES`.

    Raises:
      ValueError: too many.
    """
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes, at most {max_bytes} may come")
    return length
