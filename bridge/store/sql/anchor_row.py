"""A task's anchors as the text that its row holds: whole milliseconds by test case, with commas between them.

`higher` is called by its name in the shared text: SQLite is given this one, PostgreSQL has its own (`schema.sql`).
"""

import itertools
from collections.abc import Sequence

from bridge.store.protocol import MAX_CASE_S, MAX_CASES, MAX_TASK_KEY_BYTES


def pack(key: str, seconds: Sequence[float]) -> str:
    """The text of a row, to a millisecond.

    Raises:
      ValueError: the key is too long, there is no test case or too many, or a time is none or too long.
    """
    if not 0 < len(key.encode()) <= MAX_TASK_KEY_BYTES or "\0" in key:
        raise ValueError(f"a task's key has 1 to {MAX_TASK_KEY_BYTES} bytes and no NUL, got {key[:200]!r}")
    if not 0 < len(seconds) <= MAX_CASES:
        raise ValueError(f"task {key}: anchors of 1 to {MAX_CASES} test cases, got {len(seconds)}")
    for case_s in seconds:
        if not 0 <= case_s <= MAX_CASE_S:  # not so of NaN
            raise ValueError(f"task {key}: an anchor is of 0 to {MAX_CASE_S} seconds, got {case_s}")
    return ",".join(str(round(1000 * case_s)) for case_s in seconds)


def unpack(text: str) -> tuple[float, ...]:
    """Seconds by test case; `pack` of them is the same text again.

    Raises:
      ValueError: it is the text of no row.
    """
    return tuple(int(ms) / 1000 for ms in text.split(","))


def higher(mine: str, theirs: str) -> str:
    """The maximum of two rows, case by case; the longer one's last cases stay as they are."""
    pairs = itertools.zip_longest(mine.split(","), theirs.split(","), fillvalue="0")
    return ",".join(str(max(int(a), int(b))) for a, b in pairs)
