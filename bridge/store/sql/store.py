"""All that a store does, in SQL, over any database."""

import contextlib
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from bridge.published import RunCard
from bridge.store.protocol import GroupStore, StoredGroup, StoreLostError
from bridge.store.sql.actor import SqlActorSide
from bridge.store.sql.anchors import SqlAnchors
from bridge.store.sql.cards import SqlCards
from bridge.store.sql.fences import SqlFences
from bridge.store.sql.groups import SqlGroups
from bridge.store.sql.lead import SqlLead
from bridge.store.sql.script import Row, Step
from bridge.store.sql.tickets import SqlTickets

_FAREWELL_S = 2.0


class SqlStore(SqlLead, SqlCards, SqlFences, SqlTickets, SqlGroups, SqlAnchors, SqlActorSide, GroupStore):
    """One run in a database; safe to use from several threads, closed before a fork."""

    _num_breaks_met = 0
    """Breaks of the way to the database after which this learner has looked for an older copy."""

    @override
    def lead(self, holder: str, *, lease_s: float) -> int:
        incarnation = super().lead(holder, lease_s=lease_s)
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
    def put_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        self._mark_bucket()  # first: who has the card looks for the mark
        super().put_card(card, blobs)

    @override
    def _write(self, *steps: Step, guarded: bool = False, **options: Any) -> list[list[Row]]:
        rows = super()._write(*steps, guarded=guarded, **options)
        if guarded:
            self._groups_went()
        return rows

    @override
    def close(self) -> None:
        # Whoever can't say so ends its lead by the database's clock.
        try:
            with contextlib.suppress(StoreLostError, RuntimeError, ValueError):  # a run that was dropped, too
                self._resign(patience_s=_FAREWELL_S)
                self._give_names_back(patience_s=_FAREWELL_S)
        finally:
            super().close()
