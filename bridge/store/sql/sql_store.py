"""`SqlStore` put together; adaptive-timeout anchors.

`higher` is called by its name in the shared text: SQLite is given this one, PostgreSQL has its own (`schema.sql`).
"""

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from bridge.store.protocol import MAX_CASE_S, MAX_CASES, MAX_TASK_KEY_BYTES, GroupStore, StoredGroup
from bridge.store.sql.actor_side import SqlActorSide
from bridge.store.sql.base import SqlCards, SqlShared, check_limit
from bridge.store.sql.database import Row, Statement
from bridge.store.sql.group_rows import SqlGroups
from bridge.store.sql.learner_side import SqlFences, SqlLeadership, SqlTickets
from bridge.store.store_errors import StoreLostError
from bridge.weight_types import RunCard


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


class SqlAnchors(SqlShared, GroupStore):
    """A row a task; a row's numbers only go up, whoever writes them and in whatever order."""

    @override
    def anchors(self, keys: Collection[str]) -> dict[str, tuple[float, ...]]:
        if not keys:
            return {}
        return _by_key(self._read("SELECT key, ms FROM anchors WHERE run = :run AND key IN [keys]", keys=list(keys)))

    @override
    def raise_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        # Waits for none of the run's writers: no other call looks at these rows.
        if anchors:
            self._write(*self._raises(anchors), locks=False)

    @override
    def all_anchors(
        self, *, after: str = "", limit: int, timeout_s: float | None = None
    ) -> dict[str, tuple[float, ...]]:
        check_limit(limit)
        step = self._step(_PAGE, after=after, limit=limit)
        return _by_key(self._database.read(self._run, step, timeout_s=timeout_s))

    @override
    def put_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        if anchors:
            self._write(*self._raises(anchors), guarded=True)

    def _raises(self, anchors: Mapping[str, Sequence[float]]) -> list[Statement]:
        # In one order for all: two who raise the same tasks wait for each other, and never each for the other.
        return [self._step(_RAISE, key=key, ms=pack(key, anchors[key])) for key in sorted(anchors)]


def _by_key(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    return {key: unpack(ms) for key, ms in rows}


_FAREWELL_S = 2.0


class SqlStore(SqlLeadership, SqlCards, SqlFences, SqlTickets, SqlGroups, SqlAnchors, SqlActorSide, GroupStore):
    """One run in a database; safe to use from several threads, closed before a fork."""

    _num_breaks_met = 0
    """Breaks of the way to the database after which this learner has looked for an older copy."""

    @override
    def acquire_leadership(self, owner: str, *, lease_s: float) -> int:
        incarnation = super().acquire_leadership(owner, lease_s=lease_s)
        self._keep_objects()
        return incarnation

    @override
    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        while True:
            num_breaks = self._database.num_breaks
            if self._incarnation is not None and num_breaks != self._num_breaks_met:
                self._read_on_an_older_copy()
                self._announce_again()
                self._num_breaks_met = num_breaks
            groups = super().read_groups(after_seq=after_seq, limit=limit, kind=kind)
            if self._incarnation is None or self._database.num_breaks == num_breaks:
                return groups  # else the way broke in the middle, and these may be an older copy's

    @override
    def put_run_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        self._mark_bucket()  # first: who has the card looks for the mark
        super().put_run_card(card, blobs)

    @override
    def _write(self, *steps: Statement, guarded: bool = False, **options: Any) -> list[list[Row]]:
        rows = super()._write(*steps, guarded=guarded, **options)
        if guarded:
            self._groups_went()
        return rows

    @override
    def close(self) -> None:
        # Whoever can't say so ends its lead by the database's clock.
        try:
            with contextlib.suppress(StoreLostError, RuntimeError, ValueError):  # a run that was dropped, too
                self._release_leadership(timeout_s=_FAREWELL_S)
                self._give_names_back(timeout_s=_FAREWELL_S)
        finally:
            super().close()
