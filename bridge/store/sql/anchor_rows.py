"""Adaptive-timeout anchors of a run (T_anchor of RollPacker, section 4.3).

Shared statements call `higher` by name: SQLite gets the Python function, PostgreSQL has its own (`schema.sql`).
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

from bridge.store.sql.base import SharedStore, check_limit
from bridge.store.sql.database import Row, Statement
from bridge.store.store_types import MAX_CASE_S, MAX_CASES, MAX_TASK_KEY_BYTES


def pack(key: str, seconds: Sequence[float]) -> str:
    """Returns the text of a row, with times in milliseconds.

    Raises ValueError if the key is too long, the number of test cases is 0 or too large, or a time is invalid.
    """
    if not 0 < len(key.encode()) <= MAX_TASK_KEY_BYTES or "\0" in key:
        raise ValueError(f"task key must have 1 to {MAX_TASK_KEY_BYTES} bytes and no NUL, got {key[:200]!r}")
    if not 0 < len(seconds) <= MAX_CASES:
        raise ValueError(f"task {key}: anchors must have 1 to {MAX_CASES} test cases, got {len(seconds)}")
    for case_s in seconds:
        if not 0 <= case_s <= MAX_CASE_S:  # also rejects NaN
            raise ValueError(f"task {key}: an anchor must be 0 to {MAX_CASE_S} seconds, got {case_s}")
    return ",".join(str(round(1000 * case_s)) for case_s in seconds)


def unpack(text: str) -> tuple[float, ...]:
    """Returns the seconds per test case of a row; inverse of `pack`. Raises ValueError if the text is not a row."""
    return tuple(int(ms) / 1000 for ms in text.split(","))


def higher(mine: str, theirs: str) -> str:
    """Returns the maximum of two rows per case; additional cases of the longer row stay."""
    pairs = itertools.zip_longest(mine.split(","), theirs.split(","), fillvalue="0")
    return ",".join(str(max(int(a), int(b))) for a, b in pairs)


# Equal values are not rewritten. A repeated call finds its own maximum.
_RAISE = """INSERT INTO anchors (run, key, ms) VALUES (:run, :key, :ms)
    ON CONFLICT (run, key) DO UPDATE SET ms = higher(anchors.ms, excluded.ms)
    WHERE higher(anchors.ms, excluded.ms) <> anchors.ms"""


# With `run = :run`, PostgreSQL would sort all remaining rows for each page, because it assumes
# that a run is a small part of a table without statistics.
_PAGE = """SELECT key, ms FROM anchors WHERE (run, key) > (:run, :after) AND run <= :run
    ORDER BY run, key LIMIT :limit"""


class AnchorRows(SharedStore):
    """Store of anchors: one row per task. Values only increase, in whatever order processes write them."""

    def anchors(self, keys: Collection[str]) -> dict[str, tuple[float, ...]]:
        """Returns T_anchor (RollPacker, section 4.3): the duration of the longest correct run of each test case.

        Values are seconds, to a millisecond, per test case and task key. Tasks without anchors are omitted. Test cases
        after the last value have no anchor yet.
        """
        if not keys:
            return {}
        return _by_key(self._read("SELECT key, ms FROM anchors WHERE run = :run AND key IN [keys]", keys=list(keys)))

    def raise_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """Raises anchors (seconds per test case, by task key) to the given values where those are larger.

        Idempotent, and safe for concurrent actors in any order. No call can decrease an anchor. A value that is too
        large extends the timeout of its case, at most to T_max. Raises ValueError if a key exceeds
        `MAX_TASK_KEY_BYTES`, the number of test cases is 0 or exceeds `MAX_CASES`, or a time is NaN or outside [0,
        `MAX_CASE_S`]. Nothing is written.
        """
        # No run lock: no other call reads these rows.
        if anchors:
            self._write(*self._raises(anchors), locks=False)

    def all_anchors(
        self, *, after: str = "", limit: int, timeout_s: float | None = None
    ) -> dict[str, tuple[float, ...]]:
        """Returns up to `limit` tasks' anchors in key order, from the first key after `after`.

        Paging is complete even while actors raise anchors. `timeout_s` bounds the retries while the store is
        unreachable. Raises ValueError if the limit is negative.
        """
        check_limit(limit)
        step = self._step(_PAGE, after=after, limit=limit)
        return _by_key(self._database.read(self._run, step, timeout_s=timeout_s))

    def put_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """Raises anchors that a learner restored from its checkpoint, as `raise_anchors`."""
        if anchors:
            self._write(*self._raises(anchors), guarded=True)

    def _raises(self, anchors: Mapping[str, Sequence[float]]) -> list[Statement]:
        # One global order prevents deadlocks between processes that raise the same tasks.
        return [self._step(_RAISE, key=key, ms=pack(key, anchors[key])) for key in sorted(anchors)]


def _by_key(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    return {key: unpack(ms) for key, ms in rows}
