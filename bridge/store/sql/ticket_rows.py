"""Tickets of a run, and the actors that may not serve them."""

from collections.abc import Iterable, Sequence

from bridge.rollout_types import Ticket
from bridge.store.sql.base import OPEN, SharedStore, new_request_id, ticket_digest
from bridge.store.sql.database import Statement

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


class Tickets(SharedStore):
    """Tickets from where they are put to where their groups are acknowledged, or they are taken back; fences.

    A ticket is `open`, `claimed` (leased by one actor), `done` (its group is here) or `acknowledged` (its group was
    trained and the checkpoint that says so is on disk).
    """

    def put_tickets(self, tickets: Iterable[Ticket], *, only_for: str | None = None) -> int:
        """Offers tickets; ids the store already knows are left alone. Returns how many were new.

        With `only_for` only that actor may claim them and put their groups, also while it is fenced: probes by which it
        may show that it is clean again.
        """
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

    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        """Forgets these groups' data; the newest ids stay known (`KEPT_ORDERS`), so a late copy is refused.

        Older ones are only counted: a late copy of such a group is of no ticket.
        """
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

    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        """Drops these tickets' groups, if any, and offers the tickets again. Returns how many.

        Whatever state a ticket is in, acknowledged included; unknown ids are left out. Where single samples are tickets
        (`sample_tickets`), only those go that began on weights before the learner step `older_than`.
        """
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

    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        """Forgets tickets that nobody needs any more, wherever they are, and their groups."""
        ids = list(ticket_ids)
        self._write(
            self._step(_FORGET_GROUPS, ids=ids),
            self._step("DELETE FROM tickets WHERE run = :run AND id IN [ids]", ids=ids),
            guarded=True,
            changes=("tickets",),
        )

    def withdraw_pinned(self) -> None:
        """Forgets all evaluation and probe tickets, and their groups: nobody waits for them any more."""
        self._write(
            self._step("DELETE FROM groups WHERE run = :run AND kind <> 'train'"),
            self._step("DELETE FROM tickets WHERE run = :run AND kind <> 'train'"),
            guarded=True,
            changes=("tickets",),
        )

    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        """Goes back to a checkpoint: what was open then and acknowledged since is offered again; returns how many.

        Tickets issued after it are forgotten, since the learner issues the same ones anew when it gets there;
        but one whose group is here, made by weights of no later step, stays: it need not be generated again.
        `open_ids` were open at the checkpoint's `step`, and `next_order` was to be issued next.
        """
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

    def failed(self) -> dict[str, str]:
        """Tickets that nobody could make a group for, and why."""
        rows = self._read("SELECT id, coalesce(failure, '') FROM tickets WHERE run = :run AND state = 'failed'")
        # Whoever gave up wrote it: it is shown as one line.
        return {id_: reason if reason.isprintable() else repr(reason) for id_, reason in rows}

    def num_unclaimed(self) -> int:
        """Training tickets that no actor has claimed: what actors with room may begin at once."""
        return self._read(
            """SELECT count(*) FROM tickets
            WHERE run = :run AND state = 'open' AND kind = 'train' AND only_for IS NULL"""
        )[0][0]

    def counts(self) -> dict[str, int]:
        """Tickets by state: open, claimed, done, acknowledged, failed; also reissued (a running total)."""
        rows = self._read(
            f"""SELECT state, {NUM_TICKETS} FROM tickets WHERE run = :run GROUP BY state
            UNION ALL SELECT 'reissued', reissued FROM runs WHERE run = :run"""
        )
        return dict.fromkeys(_STATES, 0) | {state: int(number) for state, number in rows}

    @property
    def num_breaks(self) -> int:
        """Times that the way to the store broke.

        After one the store may be a standby or a restored backup, without the last tickets and groups: a learner offers
        its open tickets again.
        """
        return self._database.num_breaks

    def num_reissued(self) -> int:
        """Tickets offered again, in all; costs the same however many tickets the run has."""
        return self._read("SELECT reissued FROM runs WHERE run = :run")[0][0]

    def fence(self, actor: str, reason: str) -> None:
        """Refuses this actor's claims and groups from now on; what it holds or made goes to others.

        Its groups that are not acknowledged yet are dropped.
        """
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

    def unfence(self, actor: str) -> None:
        """Lets an actor claim and put again."""
        self._change("DELETE FROM fences WHERE run = :run AND actor = :actor", actor=actor, tells=True)

    def fenced_actors(self) -> set[str]:
        """The names of all fenced actors."""
        return {actor for (actor,) in self._read("SELECT actor FROM fences WHERE run = :run")}

    def _num_offered(self, ids: Sequence[str], call: str) -> Statement:
        """How many of these tickets a call offered; the same when the call is made again."""
        return self._step(
            "SELECT count(*) FROM tickets WHERE run = :run AND id IN [ids] AND offered_by = :call",
            ids=list(ids),
            call=call,
        )
