"""Command-line entry points."""

import signal
import sys
from types import TracebackType


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints "interrupted" for Ctrl-C instead of a traceback; leaves other uncaught errors to Python."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show
if "--multiprocessing-fork" in sys.orig_argv:  # engine subprocess: Ctrl-C in the terminal ends it silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
