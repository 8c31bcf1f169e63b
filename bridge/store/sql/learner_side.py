"""Leadership, tickets, fences."""

import contextlib
from collections.abc import Iterable, Sequence

from typing_extensions import override

from bridge.rollout_types import Ticket
from bridge.store.protocol import LearnerStore
from bridge.store.sql.base import OPEN, SqlShared, check_lease, new_request_id, ticket_digest
from bridge.store.sql.database import Statement
from bridge.store.store_errors import LearnerLivesError
from bridge.weight_types import Announcement


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


DROPPER = "whoever drops it"
"""Leads a run that is being dropped (`bridge.store.admin`), until nothing of it is left."""


class SqlLeadership(SqlShared, LearnerStore):
    """Lead and end of a run, the versions that its holder announces, the steps that earlier holders went back to."""

    _last_announced: Announcement | None = None
    """The newest announcement of this process."""

    @override
    def acquire_leadership(self, owner: str, *, lease_s: float) -> int:
        check_lease(lease_s)
        params = {"holder": owner, "lease_s": lease_s, "call": new_request_id()}
        _, rows = self._write(
            self._step(
                """UPDATE runs SET incarnation = incarnation + 1, holder = :holder, lead_by = :call,
                lead_expires_s = {now} + :lease_s, finished_step = NULL, finished_s = NULL
                WHERE run = :run AND coalesce(lead_by, '') <> :call
                    AND (holder IS NULL OR holder = :holder OR lead_expires_s <= {now})""",
                **params,
            ),
            self._step(
                "SELECT incarnation, lead_by, holder, lead_expires_s - {now}, last_seq FROM runs WHERE run = :run"
            ),
        )
        incarnation, call, leader, left_s, last_seq = rows[0]
        if leader == DROPPER and call != params["call"]:
            raise LearnerLivesError(
                f"the run is led by {DROPPER}, and parts of it are gone: drop it again to the end "
                "(launch.tools.runs --drop), and begin another"
            )
        if call != params["call"]:
            raise LearnerLivesError(
                f"the run has a learner already, at {leader}; it leads for another "
                f"{max(0.0, left_s):.0f} s unless it says that it lives: stop it, or wait"
            )
        self._incarnation, self._led_after_seq = incarnation, last_seq
        return incarnation

    @override
    def renew_leadership(self, *, lease_s: float) -> None:
        check_lease(lease_s)
        self._change("UPDATE runs SET lead_expires_s = {now} + :lease_s WHERE run = :run", lease_s=lease_s)

    @override
    def release_leadership(self) -> None:
        self._release_leadership()

    def _release_leadership(self, *, timeout_s: float | None = None) -> None:
        if self._incarnation is not None:
            self._write(
                self._step(
                    """UPDATE runs SET holder = NULL, lead_expires_s = NULL
                    WHERE run = :run AND incarnation = :incarnation""",
                    incarnation=self._incarnation,
                ),
                timeout_s=timeout_s,
            )

    @override
    def finish(self, step: int) -> None:
        self._write(
            self._step(
                """UPDATE runs SET finished_step = :step, finished_s = {now}
                WHERE run = :run AND coalesce(finished_step, -1) <> :step""",
                step=step,
            ),
            guarded=True,
            changes=("run",),
        )

    def _announce_again(self) -> None:
        """Puts this learner's last announcement, which a copy of the store without the last commits lacks."""
        if self._last_announced is not None:
            with contextlib.suppress(ValueError):  # another thread announced a newer one meanwhile
                self.announce(self._last_announced)

    @override
    def announce(self, announcement: Announcement) -> None:
        version = announcement.manifest.version
        params = {"incarnation": version.incarnation, "step": version.step, "call": new_request_id()}
        _, rows = self._write(
            self._step(
                """INSERT INTO announcements (run, incarnation, step, call, payload)
                VALUES (:run, :incarnation, :step, :call, :payload)
                ON CONFLICT (run) DO UPDATE SET incarnation = excluded.incarnation, step = excluded.step,
                    call = excluded.call, payload = excluded.payload
                WHERE (announcements.incarnation, announcements.step) <= (excluded.incarnation, excluded.step)""",
                payload=self._encode(announcement),
                **params,
            ),
            self._step("SELECT incarnation, step, call FROM announcements WHERE run = :run"),
            guarded=True,
            changes=("weights",),
        )
        if rows[0][2] == params["call"]:
            self._last_announced = announcement
        else:
            raise ValueError(f"version {version} is older than {rows[0][0]}:{rows[0][1]}, which was announced")

    @override
    def record_restore(self, incarnation: int, step: int) -> None:
        self._change(
            """INSERT INTO restores (run, incarnation, step) VALUES (:run, :incarnation, :step)
            ON CONFLICT (run, incarnation) DO UPDATE SET step = excluded.step""",
            incarnation=incarnation,
            step=step,
        )

    @override
    def restores(self) -> dict[int, int]:
        rows = self._read("SELECT incarnation, step FROM restores WHERE run = :run")
        return {incarnation: step for incarnation, step in rows}


KEPT_ORDERS = 1024
"""Orders of acknowledged training tickets, below the newest, whose ids stay known."""
NUM_TICKETS = "sum(CASE WHEN fit = '' THEN attempts ELSE 1 END)"
"""Tickets of rows: a row without `fit` stands for acknowledged ones of its kind that were forgotten, and counts them in
`attempts`. Of training tickets its `order` is their highest: a rollback below it takes off the share of the orders that
are issued again, which is exact where each order had as many tickets."""
_STATES = ("open", "claimed", "done", "acknowledged", "failed")
_FORGOTTEN = "(forgotten) "
"""Begins the id of a row that stands for forgotten tickets; its kind follows."""
_ARE_FORGOTTEN = f"run = :run AND id = '{_FORGOTTEN}train'"
_HIGHEST = f'(SELECT "order" FROM tickets WHERE {_ARE_FORGOTTEN})'
_FORGET_GROUPS = "DELETE FROM groups WHERE run = :run AND ticket_id IN [ids]"  # with their payloads, by a trigger


class SqlTickets(SqlShared, LearnerStore):
    """Tickets from where they are put to where their groups are acknowledged, or they are taken back."""

    @override
    def put_tickets(self, tickets: Iterable[Ticket], *, only_for: str | None = None) -> int:
        rows = list(tickets)
        if not rows:
            return 0
        call = new_request_id()
        insert = """INSERT INTO tickets (run, id, "order", kind, payload, fit, only_for, state, offered_by)
            VALUES (:run, :id, :order, :kind, :payload, :fit, :only_for, 'open', :call)
            ON CONFLICT (run, id) DO NOTHING"""
        steps = [
            self._step(
                insert,
                id=t.id,
                order=t.order,
                kind=t.kind,
                payload=self._encode(t),
                fit=ticket_digest(t),
                only_for=only_for,
                call=call,
            )
            for t in rows
        ]
        ids = [t.id for t in rows]
        # One that was acknowledged and forgotten is counted no more. It is marked: the call may be made twice.
        counted = f"""run = :run AND id IN [ids] AND kind = 'train' AND offered_by = :call AND given_up_by IS NULL
            AND "order" <= {_HIGHEST}"""
        steps += [
            self._step(
                f"""UPDATE tickets SET attempts = attempts - (SELECT count(*) FROM tickets WHERE {counted})
                WHERE {_ARE_FORGOTTEN}""",
                ids=ids,
                call=call,
            ),
            self._step(f"UPDATE tickets SET given_up_by = :call WHERE {counted}", ids=ids, call=call),
        ]
        return self._write(*steps, self._num_offered(ids, call), guarded=True, changes=("tickets",))[-1][0][0]

    @override
    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        ids = list(ticket_ids)
        acknowledged = "run = :run AND state = 'acknowledged'"
        # Twice as many as come: what a run has gathered before goes too, a little with each call.
        old = f"""{acknowledged} AND fit <> '' AND "order" <= (SELECT min("order") FROM (
            SELECT max("order") - :kept - 1 AS "order" FROM tickets WHERE {acknowledged}
            UNION ALL SELECT "order" FROM (SELECT "order" FROM tickets WHERE {acknowledged} AND fit <> ''
                ORDER BY "order" LIMIT 1 OFFSET :at_once) AS last) AS bounds)"""
        bounds = {"kept": KEPT_ORDERS, "at_once": 2 * len(ids)}
        # The newest tickets stay for the copies that may still come. No other needs to: a learner that falls back to an
        # older checkpoint puts those that were open then.
        self._write(
            self._step(_FORGET_GROUPS, ids=ids),
            self._step(
                """UPDATE tickets SET state = 'acknowledged', actor = NULL, lease_expires_s = NULL
                WHERE run = :run AND id IN [ids]""",
                ids=ids,
            ),
            self._step(
                f"""INSERT INTO tickets (run, id, "order", kind, payload, fit, state, attempts)
                SELECT :run, '{_FORGOTTEN}' || kind, CASE WHEN kind = 'train' THEN highest ELSE -1 END, kind, :payload,
                    '', 'acknowledged', num
                FROM (SELECT kind, count(*) AS num, max("order") AS highest FROM tickets WHERE {old} GROUP BY kind)
                    AS counted WHERE num > 0
                ON CONFLICT (run, id) DO UPDATE SET attempts = tickets.attempts + excluded.attempts,
                    "order" = CASE WHEN excluded."order" > tickets."order" THEN excluded."order"
                        ELSE tickets."order" END""",
                payload=b"",
                **bounds,
            ),
            self._step(f"DELETE FROM tickets WHERE {old}", **bounds),
            guarded=True,
        )

    @override
    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        del older_than  # a group is one ticket here
        ids, call = list(dict.fromkeys(ticket_ids)), new_request_id()
        if not ids:
            return 0
        new = "run = :run AND id IN [ids] AND coalesce(offered_by, '') <> :call"
        *_, rows = self._write(
            self._step(
                f"""DELETE FROM groups WHERE run = :run
                AND ticket_id IN (SELECT id FROM tickets WHERE {new})""",
                ids=ids,
                call=call,
            ),
            self._step(
                f"""UPDATE runs SET reissued = reissued + (SELECT count(*) FROM tickets WHERE {new})
                WHERE run = :run""",
                ids=ids,
                call=call,
            ),
            self._step(f"{OPEN}, offered_by = :call WHERE {new}", ids=ids, call=call),
            self._num_offered(ids, call),
            guarded=True,
            changes=("tickets",),
        )
        return rows[0][0]

    @override
    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        ids = list(ticket_ids)
        self._write(
            self._step(_FORGET_GROUPS, ids=ids),
            self._step("DELETE FROM tickets WHERE run = :run AND id IN [ids]", ids=ids),
            guarded=True,
            changes=("tickets",),
        )

    @override
    def withdraw_pinned(self) -> None:
        self._write(
            self._step("DELETE FROM groups WHERE run = :run AND kind <> 'train'"),
            self._step("DELETE FROM tickets WHERE run = :run AND kind <> 'train'"),
            guarded=True,
            changes=("tickets",),
        )

    @override
    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        ids, call = list(open_ids), new_request_id()
        later = """run = :run AND kind = 'train' AND "order" >= :next_order"""
        params = {"next_order": next_order, "step": step}
        remembered = """SELECT count(*) FROM tickets AS kept WHERE run = :run AND kind = 'train' AND fit <> ''
            AND kept."order" """
        *_, rows = self._write(
            # All tickets of the forgotten orders, by the share of those that stay, without the ones that have rows.
            self._step(
                f"""UPDATE tickets SET "order" = :next_order - 1,
                    attempts = (attempts + ({remembered} <= tickets."order")) * :next_order / ("order" + 1)
                        - ({remembered} < :next_order)
                WHERE {_ARE_FORGOTTEN} AND "order" >= :next_order""",
                next_order=next_order,
            ),
            self._step(f"UPDATE tickets SET attempts = 0 WHERE {_ARE_FORGOTTEN} AND attempts < 0"),
            self._step(
                f"""DELETE FROM groups WHERE run = :run AND max_step > :step
                AND ticket_id IN (SELECT id FROM tickets WHERE {later})""",
                **params,
            ),
            self._step(
                f"""DELETE FROM tickets WHERE {later}
                AND id NOT IN (SELECT ticket_id FROM groups WHERE run = :run)""",
                **params,
            ),
            self._step(
                f"""{OPEN}, offered_by = :call
                WHERE run = :run AND state = 'acknowledged' AND kind = 'train' AND id IN [ids]""",
                ids=ids,
                call=call,
            ),
            self._num_offered(ids, call),
            guarded=True,
            changes=("tickets",),
        )
        return rows[0][0]

    @override
    def failed(self) -> dict[str, str]:
        rows = self._read("SELECT id, coalesce(failure, '') FROM tickets WHERE run = :run AND state = 'failed'")
        # Whoever gave up wrote it: it is shown as one line.
        return {id_: reason if reason.isprintable() else repr(reason) for id_, reason in rows}

    @override
    def num_unclaimed(self) -> int:
        return self._read(
            """SELECT count(*) FROM tickets
            WHERE run = :run AND state = 'open' AND kind = 'train' AND only_for IS NULL"""
        )[0][0]

    @override
    def counts(self) -> dict[str, int]:
        rows = self._read(
            f"""SELECT state, {NUM_TICKETS} FROM tickets WHERE run = :run GROUP BY state
            UNION ALL SELECT 'reissued', reissued FROM runs WHERE run = :run"""
        )
        return dict.fromkeys(_STATES, 0) | {state: int(number) for state, number in rows}

    @property
    @override
    def num_breaks(self) -> int:
        return self._database.num_breaks

    @override
    def num_reissued(self) -> int:
        return self._read("SELECT reissued FROM runs WHERE run = :run")[0][0]

    def _num_offered(self, ids: Sequence[str], call: str) -> Statement:
        """How many of these tickets a call offered; the same when the call is made again."""
        return self._step(
            "SELECT count(*) FROM tickets WHERE run = :run AND id IN [ids] AND offered_by = :call",
            ids=list(ids),
            call=call,
        )
