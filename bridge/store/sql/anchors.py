"""The longest correct runs of tasks' test cases, in SQL; what they are for says `protocol.ActorStore.anchors`."""

from collections.abc import Collection, Mapping, Sequence

from typing_extensions import override

from bridge.store.protocol import GroupStore
from bridge.store.sql.anchor_row import pack, unpack
from bridge.store.sql.script import Row, Step
from bridge.store.sql.shared import SqlShared, check_limit

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
        self, *, after: str = "", limit: int, patience_s: float | None = None
    ) -> dict[str, tuple[float, ...]]:
        check_limit(limit)
        step = self._step(_PAGE, after=after, limit=limit)
        return _by_key(self._database.read(self._run, step, patience_s=patience_s))

    @override
    def put_anchors(self, anchors: Mapping[str, Sequence[float]]) -> None:
        if anchors:
            self._write(*self._raises(anchors), guarded=True)

    def _raises(self, anchors: Mapping[str, Sequence[float]]) -> list[Step]:
        # In one order for all: two who raise the same tasks wait for each other, and never each for the other.
        return [self._step(_RAISE, key=key, ms=pack(key, anchors[key])) for key in sorted(anchors)]


def _by_key(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    return {key: unpack(ms) for key, ms in rows}
