"""A limit on the processor time of one computation: a busy machine uses it up no faster than an idle one."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

MAX_CPU_S = 3.0
"""Seconds of processor time of one judgement, which takes hundredths of them; a response that takes more is wrong."""
_REPEATED_S = 0.2
"""A second signal follows the first, should code that catches everything have caught it."""


class _OutOfTimeError(BaseException):
    """Raised within the computation; no Exception, as the algebra system catches those."""


def limited(function: Callable[[], T], *, limit_s: float, otherwise: T) -> T:
    """Returns what a function returns, or `otherwise` if it takes more than `limit_s` seconds of processor time.

    Only the main thread of a process can be interrupted; in another one the function runs to its end. One call within
    another is bounded by the outer limit.
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
