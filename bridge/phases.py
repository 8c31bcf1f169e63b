"""What a process is at while nothing is to be seen of it yet: a line on stdout, which its log keeps.

Whoever shows a run reads it there, so a process that others started says the same as one started by hand.
"""

import re

_MARK = "phase: "
_LINE = re.compile(rf"(?:\([^()]*\) )?{_MARK}(.*)")
"""What an engine's process prints may begin with who it is, in parentheses."""
_OVER = "over"


def say_phase(what: str) -> None:
    """Says what begins now, in a few words; it lasts until the next one, or until `end_phase`."""
    print(f"{_MARK}{what}", flush=True)


def end_phase() -> None:
    """Says that what was begun is done, and nothing that takes long follows."""
    say_phase(_OVER)


def read_phase(line: str) -> str | None:
    """What a line of a log says has begun; empty where something ended, None if it is any other line."""
    found = _LINE.match(line)
    if found is None:
        return None
    what = found[1].strip()
    return "" if what == _OVER else what
