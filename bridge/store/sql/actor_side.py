"""What an actor asks of a store, in SQL. An actor's role may do this much and no more (`postgres/schema.sql`)."""

from collections.abc import Sequence

from typing_extensions import override

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Ticket
from bridge.store.claim import CLAIM
from bridge.store.protocol import COUNTED_S, ActorStore
from bridge.store.sql.base import FENCE, OPEN, check_lease, check_limit, describe_misfit, new_request_id, ticket_digest
from bridge.store.sql.database import NO_LIMIT
from bridge.store.sql.group_rows import BlobLocation, SqlObjects
from bridge.store.store_errors import FencedError, UnfitGroupError

_MAX_REASON_CHARS = 1000
# A group is taken once: a call that is made again finds its own name in `done_by`, whatever became of the group since.
_TAKES = """EXISTS (SELECT 1 FROM tickets
    WHERE run = :run AND id = :ticket_id AND fit = :fit AND state NOT IN ('done', 'acknowledged')
        AND coalesce(done_by, '') <> :call
        AND (only_for = :actor OR (only_for IS NULL
            AND NOT EXISTS (SELECT 1 FROM fences WHERE run = :run AND actor = :actor))))"""


class SqlActorSide(SqlObjects, ActorStore):
    """Claims, leases and groups."""

    @override
    def engine_capacity(self, *, anew: bool = False) -> dict[int, int]:
        is_old = "abs({now} - counted_s) >= :counted_s"  # also after a clock was set back
        look = self._step(f"SELECT sizes, {is_old} FROM serving WHERE run = :run", counted_s=COUNTED_S)
        rows = self._database.read(self._run, look)
        if anew or any(needed for _, needed in rows):
            # Who finds it counted meanwhile does not count again; the count itself is the table's own (its trigger).
            count = self._step(
                f"UPDATE serving SET counted_s = {{now}} WHERE run = :run AND {is_old}",
                counted_s=0.0 if anew else COUNTED_S,
            )
            rows = self._write(count, look, locks=False)[1]
        pairs = (pair.split(":") for sizes, _ in rows for pair in sizes.split(",") if pair)
        return {int(size): int(num) for size, num in pairs}

    @override
    def register_actor(self, beat: Heartbeat, *, location: str) -> None:
        self._beat(beat, location)
        self._places[beat.process] = location

    def _give_names_back(self, *, timeout_s: float) -> None:
        for name, place in self._places.items():
            self._write(
                self._step(
                    """UPDATE heartbeats SET holder = '', time_s = {now}, places = NULL
                    WHERE run = :run AND process = :name AND holder = :place""",
                    name=name,
                    place=place,
                ),
                locks=False,
                timeout_s=timeout_s,
            )

    @override
    def claim(
        self,
        actor: str,
        *,
        limit: int,
        lease_s: float,
        width: int | None = None,
        among: int = 1,
        part: int | None = None,
        places: int = 1,
        all_places: int | None = None,
        served: Sequence[str] = (),
    ) -> list[Ticket]:
        check_limit(limit)
        check_lease(lease_s)
        # A claim that is made again gets the tickets it got.
        who = {"actor": actor, "call": new_request_id()}
        _, _, fences, rows = self._write(
            self._step(
                """UPDATE tickets SET served = 1
                WHERE run = :run AND id IN [served] AND state = 'claimed' AND actor = :actor""",
                served=list(served),
                **who,
            ),
            self._step(
                CLAIM,
                limit=limit,
                lease_s=lease_s,
                width=NO_LIMIT if width is None else width,
                num_train_offers=limit if width is None and part is None else NO_LIMIT,
                num_groups=limit if width is None and part is not None else NO_LIMIT,
                among=max(1, among),
                places=places,
                all_places=max(1, among) * places if all_places is None else max(places, all_places),
                no_limit=NO_LIMIT,
                part=NO_LIMIT if part is None else part,
                **who,
            ),
            self._step(
                FENCE
                + """ AND NOT EXISTS (SELECT 1 FROM tickets
                    WHERE run = :run AND only_for = :actor AND state IN ('open', 'claimed'))""",
                **who,
            ),
            self._step(
                """SELECT payload FROM tickets WHERE run = :run AND state = 'claimed' AND claim = :call
                ORDER BY "order", number""",
                **who,
            ),
            changes=("tickets",),
            notify_if=self._step(
                """SELECT 1 FROM tickets
                WHERE run = :run AND state = 'claimed' AND lease_expires_s <= {now} AND actor <> :actor LIMIT 1""",
                **who,
            ),
            # Who follows claims with more tickets need not look again and again.
            told_after={
                "claims": self._step(
                    """SELECT 1 FROM tickets
                    WHERE run = :run AND state = 'claimed' AND claim = :call AND kind = 'train' LIMIT 1""",
                    **who,
                )
            },
        )
        if fences and not rows:
            raise FencedError(f"actor {actor} is fenced: {fences[0][0]}")
        return self._tickets(rows)

    @override
    def leased(self, actor: str) -> set[str]:
        rows = self._read(
            "SELECT id FROM tickets WHERE run = :run AND state = 'claimed' AND actor = :actor", actor=actor
        )
        return {id_ for (id_,) in rows}

    @override
    def renew(self, actor: str, ticket_ids: Sequence[str], *, lease_s: float) -> list[str]:
        check_lease(lease_s)
        held = "WHERE run = :run AND id IN [ids] AND state = 'claimed' AND actor = :actor"
        params = {"ids": list(ticket_ids), "actor": actor, "lease_s": lease_s}
        _, rows = self._write(
            self._step(f"UPDATE tickets SET lease_expires_s = {{now}} + :lease_s {held}", **params),
            self._step(f"SELECT id FROM tickets {held}", **params),
        )
        still = {id_ for (id_,) in rows}
        return [i for i in ticket_ids if i in still]

    @override
    def release(self, actor: str, ticket_ids: Sequence[str]) -> None:
        self._write(
            self._step(
                f"{OPEN} WHERE run = :run AND id IN [ids] AND state = 'claimed' AND actor = :actor",
                ids=list(ticket_ids),
                actor=actor,
            ),
            changes=("tickets",),
        )

    @override
    def put_group(self, group: Group) -> bool:
        with self._stowed(group.ticket_id, self._encode(group)) as stowed:
            stowed.is_taken = self._hand_in(group, stowed)
            return stowed.is_taken

    def _hand_in(self, group: Group, stowed: BlobLocation) -> bool:
        params = {
            "ticket_id": group.ticket_id,
            "kind": group.kind,
            "actor": group.actor,
            "max_step": group.max_step,
            "fit": ticket_digest(group),
            "call": new_request_id(),
        }
        *_, fences, rows = self._write(
            self._step(f"UPDATE runs SET last_seq = last_seq + 1 WHERE run = :run AND {_TAKES}", **params),
            self._step(
                f"""INSERT INTO groups (run, seq, ticket_id, kind, actor, max_step, call)
                SELECT run, last_seq, :ticket_id, :kind, :actor, :max_step, :call FROM runs
                WHERE run = :run AND {_TAKES}""",
                **params,
            ),
            self._step(
                f"""UPDATE tickets SET state = 'done', actor = :actor, lease_expires_s = NULL, done_by = :call
                WHERE run = :run AND id = :ticket_id AND {_TAKES}""",
                **params,
            ),
            self._step(
                """DELETE FROM payloads WHERE run = :run AND call = :call
                AND NOT EXISTS (SELECT 1 FROM groups WHERE run = :run AND call = :call)""",
                **params,
            ),
            self._step(FENCE, **params),
            self._step(
                """SELECT fit, done_by, only_for, CASE WHEN fit <> :fit THEN payload END FROM tickets
                WHERE run = :run AND id = :ticket_id""",
                **params,
            ),
            before_lock=[
                self._step(
                    """INSERT INTO payloads (run, call, payload, object) VALUES (:run, :call, :payload, :object)
                    ON CONFLICT DO NOTHING""",
                    call=params["call"],
                    payload=stowed.payload,
                    object=stowed.object,
                )
            ],
            changes=("groups",),
        )
        if rows and rows[0][1] == params["call"]:
            return True
        is_alone = bool(rows) and rows[0][2] == group.actor
        if fences and not is_alone:
            raise FencedError(f"actor {group.actor} is fenced: {fences[0][0]}")
        if not rows:
            raise KeyError(f"the store knows no ticket {group.ticket_id!r}")
        fit, _, only_for, payload = rows[0]
        if fit != params["fit"]:
            raise UnfitGroupError(describe_misfit(self._decode(Ticket, payload), group))
        if only_for is not None and not is_alone:
            raise UnfitGroupError(f"ticket {group.ticket_id} is for actor {only_for} alone, not for {group.actor}")
        return False

    @override
    def fail_ticket(self, ticket_id: str, reason: str, *, max_attempts: int) -> None:
        params = {
            "id": ticket_id,
            "reason": reason[:_MAX_REASON_CHARS].replace("\0", ""),
            "max_attempts": max_attempts,
            "call": new_request_id(),
        }
        mine = "run = :run AND id = :id AND state = 'claimed' AND coalesce(given_up_by, '') <> :call"
        self._write(
            self._step(
                f"""UPDATE runs SET reissued = reissued + 1 WHERE run = :run
                AND EXISTS (SELECT 1 FROM tickets WHERE {mine} AND attempts + 1 < :max_attempts)""",
                **params,
            ),
            self._step(
                f"""UPDATE tickets SET attempts = attempts + 1, failure = :reason, actor = NULL, lease_expires_s = NULL,
                given_up_by = :call, state = CASE WHEN attempts + 1 >= :max_attempts THEN 'failed' ELSE 'open' END
                WHERE {mine}""",
                **params,
            ),
            changes=("tickets",),
        )
