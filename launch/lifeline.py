"""Children that die with their parent, whatever it dies of."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
VARIABLE = "SLUICE_PARENT_PID"
"""Set by a parent whose children must not outlive it."""


def die_with_parent() -> None:
    """Asks the kernel to end this process when the parent named in the environment is gone (Linux)."""
    parent = os.environ.get(VARIABLE)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)
