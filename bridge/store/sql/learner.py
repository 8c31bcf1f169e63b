"""What the learner asks of a store, in SQL. What is written is guarded: an older incarnation's is refused."""

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence

from absl import logging
from typing_extensions import override

from bridge import codec
from bridge.published import Announcement, RunCard
from bridge.store.group_objects import BadObjectError, Reference
from bridge.store.protocol import LearnerLivesError, LearnerStore, StoredGroup
from bridge.store.sql.actor import check_blob
from bridge.store.sql.fit import fit_of
from bridge.store.sql.objects import SqlObjects
from bridge.store.sql.script import Database, Step
from bridge.store.sql.shared import check_lease, check_limit, new_call
from bridge.types import Group, Ticket

_STATES = ("open", "claimed", "done", "acknowledged", "failed")
_OPEN = "UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL"
_FORGET_GROUPS = "DELETE FROM groups WHERE run = :run AND ticket_id IN [ids]"  # with their payloads, by a trigger


class SqlLearnerSide(SqlObjects, LearnerStore):
    """Tickets, complete groups, fences, and the lead of a run."""

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """See `SqlShared`."""
        super().__init__(database, run=run, max_message_bytes=max_message_bytes)
        self.set_aside: collections.Counter[str] = collections.Counter()
        """Groups that could not be read, by the actor that they name; their tickets were offered again."""
        self.page_bytes = 2 * max_message_bytes
        """`read_groups` stops after so much, so that many large groups at once don't fill the memory."""

    @override
    def lead(self, holder: str, *, lease_s: float) -> int:
        check_lease(lease_s)
        params = {"holder": holder, "lease_s": lease_s, "call": new_call()}
        _, rows = self._write(
            self._step(
                """UPDATE runs SET incarnation = incarnation + 1, holder = :holder, lead_by = :call,
                lead_expires_s = {now} + :lease_s
                WHERE run = :run AND coalesce(lead_by, '') <> :call
                    AND (holder IS NULL OR holder = :holder OR lead_expires_s <= {now})""",
                **params,
            ),
            self._step("SELECT incarnation, lead_by, holder, lead_expires_s - {now} FROM runs WHERE run = :run"),
        )
        incarnation, call, leader, left_s = rows[0]
        if call != params["call"]:
            raise LearnerLivesError(
                f"the run has a learner already, at {leader}; it leads for another "
                f"{max(0.0, left_s):.0f} s unless it says that it lives: stop it, or wait"
            )
        self._incarnation = incarnation
        return incarnation

    @override
    def keep_lead(self, *, lease_s: float) -> None:
        check_lease(lease_s)
        self._change("UPDATE runs SET lead_expires_s = {now} + :lease_s WHERE run = :run", lease_s=lease_s)

    @override
    def resign(self) -> None:
        self._resign()

    def _resign(self, *, patience_s: float | None = None) -> None:
        if self._incarnation is not None:
            self._write(
                self._step(
                    """UPDATE runs SET holder = NULL, lead_expires_s = NULL
                    WHERE run = :run AND incarnation = :incarnation""",
                    incarnation=self._incarnation,
                ),
                patience_s=patience_s,
            )

    @override
    def announce(self, announcement: Announcement) -> None:
        version = announcement.manifest.version
        params = {"incarnation": version.incarnation, "step": version.step, "call": new_call()}
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
        if rows[0][2] != params["call"]:
            raise ValueError(f"version {version} is older than {rows[0][0]}:{rows[0][1]}, which was announced")

    @override
    def put_card(self, card: RunCard, blobs: Mapping[str, bytes]) -> None:
        for hash_, content in blobs.items():
            check_blob(hash_, content)
        put = "INSERT INTO blobs (run, blake3, content) VALUES (:run, :blake3, :content) ON CONFLICT DO NOTHING"
        self._write(
            self._step(
                """INSERT INTO cards (run, payload) VALUES (:run, :payload)
                ON CONFLICT (run) DO UPDATE SET payload = excluded.payload""",
                payload=self._encode(card),
            ),
            self._step("DELETE FROM blobs WHERE run = :run AND NOT blake3 IN [kept]", kept=list(blobs)),
            before_lock=[self._step(put, blake3=h, content=c) for h, c in blobs.items()],
            guarded=True,
        )

    @override
    def put_tickets(self, tickets: Iterable[Ticket], *, only_for: str | None = None) -> int:
        rows = list(tickets)
        if not rows:
            return 0
        call = new_call()
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
                fit=fit_of(t),
                only_for=only_for,
                call=call,
            )
            for t in rows
        ]
        ids = [t.id for t in rows]
        return self._write(*steps, self._num_offered(ids, call), guarded=True, changes=("tickets",))[-1][0][0]

    @override
    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        # Nothing is missed: a number is given out by whoever holds the run's lock until it is committed, so no group
        # can appear below one already visible.
        check_limit(limit)
        rows = self._read(
            """SELECT seq, ticket_id, groups.actor, fit, payloads.payload, object
            FROM (SELECT seq AS last_seq, sum(size) OVER (ORDER BY seq) - size AS before FROM (
                    SELECT seq, length(payload) AS size
                    FROM groups JOIN payloads ON payloads.run = groups.run AND payloads.call = groups.call
                    WHERE groups.run = :run AND kind = :kind AND seq > :after_seq ORDER BY seq LIMIT :limit
                ) AS next) AS page
                JOIN groups ON groups.seq = last_seq
                JOIN payloads ON payloads.run = groups.run AND payloads.call = groups.call
                JOIN tickets ON tickets.run = groups.run AND tickets.id = ticket_id
            WHERE groups.run = :run AND before < :num_bytes ORDER BY seq""",
            kind=kind,
            after_seq=after_seq,
            limit=limit,
            num_bytes=self.page_bytes,
        )
        rows = rows[: _num_within([object_ for *_, object_ in rows], self.page_bytes)]
        messages = self._unstow([(ticket_id, payload, object_) for _, ticket_id, _, _, payload, object_ in rows])
        groups: list[StoredGroup] = []
        spoiled: list[str] = []
        for (seq, ticket_id, actor, fit, _, _), message in zip(rows, messages, strict=True):
            try:
                if isinstance(message, BadObjectError):
                    raise message
                groups.append(StoredGroup(seq, self._group(message, ticket_id, actor, fit)))
            except ValueError as e:
                logging.error("group set aside ticket=%r actor=%r: %s", ticket_id, actor, e)
                self.set_aside[actor] += 1
                spoiled.append(ticket_id)
        if self._incarnation is not None:  # others only read
            self.reissue(spoiled)
        return groups

    @property
    @override
    def num_set_aside(self) -> int:
        return sum(self.set_aside.values())

    def _group(self, payload: bytes, ticket_id: str, actor: str, fit: str) -> Group:
        """The group of a row. A role that may put one may put any bytes: what `put_group` sees to is looked at again.

        Raises:
          ValueError: it is no group, or it does not answer the row's ticket.
        """
        group = self._decode(Group, payload)
        if (group.ticket_id, group.actor) != (ticket_id, actor):
            raise ValueError(f"what is in it answers {group.ticket_id!r}, and was made by {group.actor!r}")
        if fit_of(group) != fit:
            raise ValueError("what is in it does not fit its ticket (prompt, number of rollouts, kind, round, order)")
        return group

    @override
    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        ids = list(ticket_ids)
        # The ticket itself is small and stays: a learner that falls back to an older checkpoint can have it served
        # again.
        self._write(
            self._step(_FORGET_GROUPS, ids=ids),
            self._step(
                """UPDATE tickets SET state = 'acknowledged', actor = NULL, lease_expires_s = NULL
                WHERE run = :run AND id IN [ids]""",
                ids=ids,
            ),
            guarded=True,
        )

    @override
    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        del older_than  # a group is one ticket here
        ids, call = list(dict.fromkeys(ticket_ids)), new_call()
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
            self._step(f"{_OPEN}, offered_by = :call WHERE {new}", ids=ids, call=call),
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
    def rewind(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        ids, call = list(open_ids), new_call()
        later = """run = :run AND kind = 'train' AND "order" >= :next_order"""
        params = {"next_order": next_order, "step": step}
        *_, rows = self._write(
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
                f"""{_OPEN}, offered_by = :call
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
                f"{_OPEN} WHERE run = :run AND state IN ('claimed', 'done') AND actor = :actor",
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
            """SELECT state, count(*) FROM tickets WHERE run = :run GROUP BY state
            UNION ALL SELECT 'reissued', reissued FROM runs WHERE run = :run"""
        )
        return dict.fromkeys(_STATES, 0) | {state: int(number) for state, number in rows}

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

    def _change(self, sql: str, /, *, tells: bool = False, **params: object) -> None:
        self._write(self._step(sql, **params), guarded=True, changes=("tickets",) if tells else ())

    def _num_offered(self, ids: Sequence[str], call: str) -> Step:
        """How many of these tickets a call offered; the same when the call is made again."""
        return self._step(
            "SELECT count(*) FROM tickets WHERE run = :run AND id IN [ids] AND offered_by = :call",
            ids=list(ids),
            call=call,
        )


def _num_within(objects: Sequence[str | None], num_bytes: int) -> int:
    """How many of these rows to read: up to the one whose object reaches so many bytes."""
    total = 0
    for i, object_ in enumerate(objects):
        if total >= num_bytes:
            return i
        if object_ is not None:
            with contextlib.suppress(BadObjectError):
                total += Reference.parse(object_).num_bytes
    return len(objects)
