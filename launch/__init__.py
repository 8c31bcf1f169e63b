"""Command-line entry points."""

import signal
import sys
from types import TracebackType


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error that ends the process: of Ctrl-C, wherever it comes, one word instead of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show
if "--multiprocessing-fork" in sys.orig_argv:  # an engine's process: the terminal's Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)
