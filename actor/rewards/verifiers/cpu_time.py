"""Limit on the CPU time of one computation, independent of the machine's load."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

MAX_CPU_S = 3.0
"""CPU seconds per scoring, which normally takes hundredths of a second; a response that takes longer is wrong."""
_REPEATED_S = 0.2
"""Interval of repeated signals, in seconds, in case code that catches all exceptions swallows the first."""


class _OutOfTimeError(BaseException):
    """Raised within the computation; not an Exception, because the algebra system catches those."""


def limited(function: Callable[[], T], *, limit_s: float, otherwise: T) -> T:
    """Returns a function's result, or `otherwise` if it takes more than `limit_s` seconds of CPU time.

    Only the main thread can be interrupted; in other threads the function runs to its end. The outer limit bounds
    nested calls.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        return function()
    before = signal.signal(signal.SIGVTALRM, _raise)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, _REPEATED_S)
            return function()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTimeError:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return otherwise
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _OutOfTimeError
