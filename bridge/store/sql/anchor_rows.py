"""Adaptive-timeout anchors of a run (T_anchor of RollPacker, section 4.3).

`higher` is called by its name in the shared text: SQLite is given this one, PostgreSQL has its own (`schema.sql`).
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

from bridge.store.sql.base import SharedStore, check_limit
from bridge.store.sql.database import Row, Statement
from bridge.store.store_types import MAX_CASE_S, MAX_CASES, MAX_TASK_KEY_BYTES


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


# What is there already is not written again. Called again, it finds its own maximum.
_RAISE = """INSERT INTO anchors (run, key, ms) VALUES (:run, :key, :ms)
    ON CONFLICT (run, key) DO UPDATE SET ms = higher(anchors.ms, excluded.ms)
    WHERE higher(anchors.ms, excluded.ms) <> anchors.ms"""


# In these words, as PostgreSQL sorts all that follows for each page where a run is asked for by "=": it takes a run for
# a small part of a table that nobody has analysed.
_PAGE = """SELECT key, ms FROM anchors WHERE (run, key) > (:run, :after) AND run <= :run
    ORDER BY run, key LIMIT :limit"""


class AnchorRows(SharedStore):
    """A row a task; a row's numbers only go up, whoever writes them and in whatever order."""

    def anchors(self, keys: Collection[str]) -> dict[str, tuple[float, ...]]:
        """T_anchor of RollPacker, section 4.3: how long the longest correct run of each test case took so far.

        Seconds, to a millisecond, by test case; by the key of a task. Tasks without one are left out, and cases of
        which none is known come after the last: they have no number.
        """
        if not keys:
            return {}
        return _by_key(self._read("SELECT key, ms FROM anchors WHERE run = :run AND key IN [keys]", keys=list(keys)))

    def raise_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """Raises anchors (seconds by test case, by the key of a task) to those given where these are larger.

        So it may be called again, in any order, and by all actors at once. Nobody can make an anchor smaller; who
        makes one too large lengthens that case's timeout, at most to T_max.

        Raises:
          ValueError: a key of more than `MAX_TASK_KEY_BYTES`, no test case or more than `MAX_CASES`, or a time that is
            none, below 0 or above `MAX_CASE_S`; nothing is written then.
        """
        # Waits for none of the run's writers: no other call looks at these rows.
        if anchors:
            self._write(*self._raises(anchors), locks=False)

    def all_anchors(
        self, *, after: str = "", limit: int, timeout_s: float | None = None
    ) -> dict[str, tuple[float, ...]]:
        """A page of `limit` tasks of what `ActorStore.anchors` gives, by key, from the first behind `after`.

        None is left out while actors raise some. `timeout_s` bounds the wait for a store that is away.

        Raises:
          ValueError: a negative limit.
        """
        check_limit(limit)
        step = self._step(_PAGE, after=after, limit=limit)
        return _by_key(self._database.read(self._run, step, timeout_s=timeout_s))

    def put_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        """What `ActorStore.raise_anchors` does, by a learner that has them from its checkpoint."""
        if anchors:
            self._write(*self._raises(anchors), guarded=True)

    def _raises(self, anchors: Mapping[str, Sequence[float]]) -> list[Statement]:
        # In one order for all: two who raise the same tasks wait for each other, and never each for the other.
        return [self._step(_RAISE, key=key, ms=pack(key, anchors[key])) for key in sorted(anchors)]


def _by_key(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    return {key: unpack(ms) for key, ms in rows}
