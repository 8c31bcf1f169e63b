"""Command-line entry points."""

import sys
from types import TracebackType


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error that ends the process: of Ctrl-C, wherever it comes, one word instead of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show
