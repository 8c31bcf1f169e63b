"""All that a store does, in SQL, over any database."""

import contextlib
from typing import Any

from typing_extensions import override

from bridge.store.protocol import GroupStore, StoreLostError
from bridge.store.sql.actor import SqlActorSide
from bridge.store.sql.learner import SqlLearnerSide
from bridge.store.sql.script import Row, Step

_FAREWELL_S = 2.0


class SqlStore(SqlLearnerSide, SqlActorSide, GroupStore):
    """One run in a database; safe to use from several threads, closed before a fork."""

    @override
    def lead(self, holder: str, *, lease_s: float) -> int:
        incarnation = super().lead(holder, lease_s=lease_s)
        self._keep_objects()
        return incarnation

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
            with contextlib.suppress(StoreLostError, RuntimeError):
                self._resign(patience_s=_FAREWELL_S)
        finally:
            super().close()
