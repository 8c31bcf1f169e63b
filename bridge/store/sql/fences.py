"""Which actors are fenced: what they made and hold is others' from then on."""

from typing_extensions import override

from bridge.store.protocol import LearnerStore
from bridge.store.sql.shared import OPEN, SqlShared


class SqlFences(SqlShared, LearnerStore):
    """The learner's word on who may not serve."""

    @override
    def fence(self, actor: str, reason: str) -> None:
        self._write(
            self._step(
                """INSERT INTO fences (run, actor, reason) VALUES (:run, :actor, :reason)
                ON CONFLICT (run, actor) DO UPDATE SET reason = excluded.reason""",
                actor=actor,
                reason=reason,
            ),
            self._step(
                """DELETE FROM groups WHERE run = :run
                AND ticket_id IN (SELECT id FROM tickets WHERE run = :run AND state = 'done' AND actor = :actor)""",
                actor=actor,
            ),
            self._step(
                f"{OPEN} WHERE run = :run AND state IN ('claimed', 'done') AND actor = :actor",
                actor=actor,
            ),
            guarded=True,
            changes=("tickets",),
        )

    @override
    def unfence(self, actor: str) -> None:
        self._change("DELETE FROM fences WHERE run = :run AND actor = :actor", actor=actor, tells=True)

    @override
    def fenced_actors(self) -> set[str]:
        return {actor for (actor,) in self._read("SELECT actor FROM fences WHERE run = :run")}
