"""The host's memory."""

import ctypes


def give_back_free_memory() -> None:
    """Returns what malloc holds and nobody uses to the system; does nothing where the C library has no such call.

    Compiling the learner's steps leaves some 300 MB behind, which would stay with the process for good.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
