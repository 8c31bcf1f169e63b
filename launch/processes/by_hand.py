"""What a process that another program starts says to somebody who starts it by hand."""

import sys
from collections.abc import Sequence
from typing import NoReturn

_USAGE_ERROR = 2


def arguments(argv: Sequence[str], wanted: str, *, command: str) -> list[str]:
    """The arguments of this process, without its name.

    Ends it with one line and code 2 where they are others than wanted: it was started by hand.

    Args:
      argv: with its name.
      wanted: their names, with spaces between.
      command: what people start.
    """
    given = list(argv[1:])
    if len(given) != len(wanted.split()) or any(one.startswith("-") for one in given):
        refuse(command, f"it takes {wanted}, got {' '.join(given) or 'nothing'}")
    return given


def refuse(command: str, why: str) -> NoReturn:
    """Ends the process with one line and code 2."""
    print(f"error: this process is started by {command}, not by hand: {why}", file=sys.stderr)
    sys.exit(_USAGE_ERROR)
