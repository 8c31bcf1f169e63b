"""Store operations on a run's tickets and fences."""

from collections.abc import Iterable, Iterator, Sequence

from bridge.rollout_types import Ticket
from bridge.store.sql.base import OPEN, SharedStore, new_request_id, ticket_digest
from bridge.store.sql.database import Statement

KEPT_ORDERS = 1024
"""Number of newest orders whose acknowledged training tickets keep their ids."""
NUM_TICKETS = "sum(CASE WHEN fit = '' THEN attempts ELSE 1 END)"
"""SQL for the number of tickets in rows. A row without `fit` stands for forgotten acknowledged tickets of its kind and
counts them in `attempts`. For training tickets, its `order` is their highest. A rollback below it subtracts a
proportional share, which is exact if each order had equally many tickets."""
_TICKETS_PER_TRANSACTION, _BYTES_PER_TRANSACTION = 256, 256 * 2**20
"""Maximum tickets whose groups one transaction deletes, and bytes of more than one group, so that it ends within the
time limit of the run's lock."""
_STATES = ("open", "claimed", "done", "acknowledged", "failed")
_FORGOTTEN = "(forgotten) "
"""Prefix of the id of a row for forgotten tickets; the kind follows."""
_ARE_FORGOTTEN = f"run = :run AND id = '{_FORGOTTEN}train'"
_HIGHEST = f'(SELECT "order" FROM tickets WHERE {_ARE_FORGOTTEN})'
_FORGET_GROUPS = "DELETE FROM groups WHERE run = :run AND ticket_id IN [ids]"  # with their payloads, by a trigger


def _names(column: str) -> str:
    """Returns the SQL condition that the actor is one of the names in a column, which "&" joins."""
    return f"replace('&' || {column} || '&', '&' || :actor || '&', '') <> '&' || {column} || '&'"


_SERVED, _CONTINUED = _names("actor"), _names("actors")


class Tickets(SharedStore):
    """Tickets from their creation until they are acknowledged or withdrawn, and fences.

    Ticket states: `open`; `claimed`: leased by one actor; `done`: its group is stored; `acknowledged`: its group is
    trained, and a checkpoint on disk includes it; `failed`.
    """

    def put_tickets(self, tickets: Iterable[Ticket], *, only_for: str | None = None) -> int:
        """Offers tickets and returns the number of new ones. Ids that the store knows are unchanged.

        With `only_for`, only that actor may claim them and put their groups, even while it is fenced. Such probes allow
        a fenced actor to be re-admitted.
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
        # A reoffered ticket that was acknowledged and forgotten no longer counts as such. It is marked, because the
        # call may be repeated.
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
        """Deletes the data of trained groups.

        The newest ids stay known (`KEPT_ORDERS`), so that a late copy is rejected. Older tickets are only counted: a
        late copy of such a group raises KeyError. Uses several transactions (`_slices`), and may be repeated.
        """
        for ids in self._slices(ticket_ids):
            self._acknowledge(ids)

    def _acknowledge(self, ids: list[str]) -> None:
        acknowledged = "run = :run AND state = 'acknowledged'"
        # Forgets up to twice as many as arrive, so that an older backlog shrinks with each call.
        old = f"""{acknowledged} AND fit <> '' AND "order" <= (SELECT min("order") FROM (
            SELECT max("order") - :kept - 1 AS "order" FROM tickets WHERE {acknowledged}
            UNION ALL SELECT "order" FROM (SELECT "order" FROM tickets WHERE {acknowledged} AND fit <> ''
                ORDER BY "order" LIMIT 1 OFFSET :at_once) AS last) AS bounds)"""
        bounds = {"kept": KEPT_ORDERS, "at_once": 2 * len(ids)}
        # The newest tickets stay, because late copies may still arrive. The others need not: a learner that rolls back
        # to an older checkpoint puts its open tickets again.
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
        """Drops the groups of tickets, if any, and offers the tickets again; returns their number.

        Applies to tickets in any state, including acknowledged ones; unknown ids are ignored. If single samples are
        tickets (`sample_tickets`), only samples that started on weights before the learner step `older_than` are
        reissued.
        """
        del older_than  # a group is one ticket here
        return sum(map(self._reissue, self._slices(list(dict.fromkeys(ticket_ids)))))

    def _reissue(self, ids: list[str]) -> int:
        call = new_request_id()
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
        """Deletes tickets that are not needed any more, in any state, and their groups, in several transactions."""
        for ids in self._slices(ticket_ids):
            self._write(
                self._step(_FORGET_GROUPS, ids=ids),
                self._step("DELETE FROM tickets WHERE run = :run AND id IN [ids]", ids=ids),
                guarded=True,
                changes=("tickets",),
            )

    def withdraw_pinned(self) -> None:
        """Deletes all evaluation and probe tickets and their groups, which no process waits for any more."""
        self.withdraw([id_ for (id_,) in self._read("SELECT id FROM tickets WHERE run = :run AND kind <> 'train'")])

    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        """Rolls back to the checkpoint of a step; returns the number of tickets that are offered again.

        Offers tickets again that were open at the checkpoint (`open_ids`) and acknowledged since. Deletes tickets
        issued after it (from `next_order` on), because the learner regenerates the same tickets. A ticket whose group
        is stored and was generated by weights up to `step` stays, so that it need not be generated again. May be
        repeated if it is interrupted.
        """
        ids, call = list(open_ids), new_request_id()
        later = """run = :run AND kind = 'train' AND "order" >= :next_order"""
        remembered = """SELECT count(*) FROM tickets AS kept WHERE run = :run AND kind = 'train' AND fit <> ''
            AND kept."order" """
        *_, rows = self._write(
            # Scales the forgotten tickets by the share of orders that stay, and leaves out those that have rows.
            self._step(
                f"""UPDATE tickets SET "order" = :next_order - 1,
                    attempts = (attempts + ({remembered} <= tickets."order")) * :next_order / ("order" + 1)
                        - ({remembered} < :next_order)
                WHERE {_ARE_FORGOTTEN} AND "order" >= :next_order""",
                next_order=next_order,
            ),
            self._step(f"UPDATE tickets SET attempts = 0 WHERE {_ARE_FORGOTTEN} AND attempts < 0"),
            # It may be of weights after the checkpoint.
            self._step("DELETE FROM progress WHERE run = :run"),
            self._step(
                f"""DELETE FROM tickets WHERE {later}
                AND id NOT IN (SELECT ticket_id FROM groups WHERE run = :run)""",
                next_order=next_order,
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
        newer = self._read(
            f"""SELECT ticket_id FROM groups WHERE run = :run AND max_step > :step
            AND ticket_id IN (SELECT id FROM tickets WHERE {later})""",
            next_order=next_order,
            step=step,
        )
        self.withdraw([id_ for (id_,) in newer])
        return rows[0][0]

    def failed(self) -> dict[str, str]:
        """Returns failed tickets and the reasons of their last failures."""
        rows = self._read("SELECT id, coalesce(failure, '') FROM tickets WHERE run = :run AND state = 'failed'")
        # An actor wrote the reason; it must display as one line.
        return {id_: reason if reason.isprintable() else repr(reason) for id_, reason in rows}

    def num_unclaimed(self) -> int:
        """Returns the number of open training tickets, which actors with free capacity could start now."""
        return self._read(
            """SELECT count(*) FROM tickets
            WHERE run = :run AND state = 'open' AND kind = 'train' AND only_for IS NULL"""
        )[0][0]

    def counts(self) -> dict[str, int]:
        """Returns tickets by state (open, claimed, done, acknowledged, failed), and the cumulative number reissued."""
        rows = self._read(
            f"""SELECT state, {NUM_TICKETS} FROM tickets WHERE run = :run GROUP BY state
            UNION ALL SELECT 'reissued', reissued FROM runs WHERE run = :run"""
        )
        return dict.fromkeys(_STATES, 0) | {state: int(number) for state, number in rows}

    @property
    def num_breaks(self) -> int:
        """Cumulative number of broken connections to the store.

        After a break, the store may be a standby or a restored backup without the last tickets and groups. The learner
        then offers its open tickets again.
        """
        return self._database.num_breaks

    def num_reissued(self) -> int:
        """Returns the cumulative number of reissued tickets, at constant cost."""
        return self._read("SELECT reissued FROM runs WHERE run = :run")[0][0]

    def fence(self, actor: str, reason: str, *, trained: Sequence[str] = ()) -> None:
        """Fences an actor: rejects its claims and groups, reissues its tickets, and drops its unacknowledged groups.

        Its groups of `trained` tickets are acknowledged instead of reissued, so that no actor generates them again. A
        rollback to a checkpoint without them reissues them. Tickets that others continue from its tokens begin anew.
        """
        served = self._read(
            f"SELECT id FROM tickets WHERE run = :run AND state = 'done' AND id IN [trained] AND {_SERVED}",
            trained=list(trained),
            actor=actor,
        )
        self.acknowledge([id_ for (id_,) in served])
        done = self._read(f"SELECT id FROM tickets WHERE run = :run AND state = 'done' AND {_SERVED}", actor=actor)
        for ids in list(self._slices([id_ for (id_,) in done]))[:-1]:  # too many for the last transaction
            self._reissue(ids)
        self._write(
            self._step(
                """INSERT INTO fences (run, actor, reason) VALUES (:run, :actor, :reason)
                ON CONFLICT (run, actor) DO UPDATE SET reason = excluded.reason""",
                actor=actor,
                reason=reason,
            ),
            self._step(
                f"""DELETE FROM groups WHERE run = :run
                AND ticket_id IN (SELECT id FROM tickets WHERE run = :run AND state = 'done' AND {_SERVED})""",
                actor=actor,
            ),
            self._step(
                f"""{OPEN} WHERE run = :run AND (state IN ('claimed', 'done') AND {_SERVED} OR state = 'claimed'
                    AND id IN (SELECT ticket_id FROM progress WHERE run = :run AND {_CONTINUED}))""",
                actor=actor,
            ),
            self._step(f"DELETE FROM progress WHERE run = :run AND {_CONTINUED}", actor=actor),
            guarded=True,
            changes=("tickets",),
        )

    def unfence(self, actor: str) -> None:
        """Lifts a fence: the actor may claim tickets and put groups again."""
        self._change("DELETE FROM fences WHERE run = :run AND actor = :actor", actor=actor, tells=True)

    def fenced_actors(self) -> set[str]:
        """Returns the names of all fenced actors."""
        return {actor for (actor,) in self._read("SELECT actor FROM fences WHERE run = :run")}

    def _num_offered(self, ids: Sequence[str], call: str) -> Statement:
        """Returns the statement that counts the tickets that a call offered; a repeated call gives the same count."""
        return self._step(
            "SELECT count(*) FROM tickets WHERE run = :run AND id IN [ids] AND offered_by = :call",
            ids=list(ids),
            call=call,
        )

    def _slices(self, ids: Sequence[str]) -> Iterator[list[str]]:
        """Yields the tickets in slices whose groups one transaction may delete."""
        sizes: dict[str, int] = dict(
            self._read(
                """SELECT ticket_id, coalesce((SELECT length(payload) FROM payloads
                    WHERE run = groups.run AND call = groups.call), 0)
                FROM groups WHERE run = :run AND ticket_id IN [ids]""",
                ids=list(ids),
            )
        )
        taken: list[str] = []
        num_bytes = 0
        for id_ in ids:
            num_bytes += sizes.get(id_, 0)
            if taken and (len(taken) == _TICKETS_PER_TRANSACTION or num_bytes > _BYTES_PER_TRANSACTION):
                yield taken
                taken, num_bytes = [], sizes.get(id_, 0)
            taken.append(id_)
        if taken:
            yield taken
