"""The tie between a process and its parent (Linux)."""

import ctypes
import os
import signal

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
