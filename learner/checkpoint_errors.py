"""What a checkpoint failed with, in our words: Orbax's storage and other hosts say it in theirs."""

import contextlib
import errno
import pathlib
from collections.abc import Generator

from learner.hosts.meeting import MeetingOverError

_OF_SYSTEM = " [os_error_code="
"""What TensorStore, by which Orbax reads and writes, says of an error of the system."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def system_errors(step: pathlib.Path) -> Generator[None]:
    """What Orbax's storage could not read comes as a ValueError, as if something wrong had been given.

    Raises:
      OSError: it is the system's.
    """
    try:
        yield
    except ValueError as e:
        said, is_of_system, _ = str(e).partition(_OF_SYSTEM)
        if not is_of_system:
            raise
        raise OSError(f"the checkpoint {step} can't be read: {said}") from e


def reason(error: Exception) -> str:
    """Why a save failed, in one line; Orbax's own errors tell of the files inside, and come as other errors."""
    text = str(error)
    if "No space left on device" in text or (isinstance(error, OSError) and error.errno in _FULL):
        return "its disk is full"
    return " ".join(text.split())[:300] or type(error).__name__


def cause(error: Exception) -> Exception:
    """What a host failed with, before it heard at the next meeting that it failed alone."""
    while isinstance(error, MeetingOverError) and isinstance(error.__context__, Exception):
        error = error.__context__
    return error
