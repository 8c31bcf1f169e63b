"""Complete groups, as the learner reads them: in the order they came, in pages, and looked at before they are used."""

import collections
import contextlib
from collections.abc import Sequence

from absl import logging
from typing_extensions import override

from bridge import codec
from bridge.store.group_objects import BadObjectError, Reference
from bridge.store.protocol import LearnerStore, StoredGroup
from bridge.store.sql.fit import fit_of
from bridge.store.sql.objects import SqlObjects
from bridge.store.sql.script import Database
from bridge.store.sql.shared import check_limit
from bridge.types import Group


class SqlGroups(SqlObjects, LearnerStore):
    """Groups that are there for the learner; those that can't be read are set aside, and offered again."""

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """See `SqlShared`."""
        super().__init__(database, run=run, max_message_bytes=max_message_bytes)
        self.set_aside: collections.Counter[str] = collections.Counter()
        """Groups that could not be read, by the actor that they name; their tickets were offered again."""
        self._lost_in_a_row: collections.Counter[str] = collections.Counter()
        self._newest_seq = 0
        """The highest number that this learner has read."""
        self.page_bytes = 2 * max_message_bytes
        """`read_groups` stops after so much, so that many large groups at once don't fill the memory."""

    @override
    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        # Nothing is missed: a number is given out by whoever holds the run's lock until it is committed, so no group
        # can appear below one already visible.
        check_limit(limit)
        # Looked up row by row, not joined: a plan that was made while the tables were empty (a prepared statement keeps
        # it) would go through all tickets for each payload.
        rows = self._read(
            """SELECT seq, ticket_id, actor, fit,
                (SELECT payload FROM payloads WHERE run = :run AND call = group_call),
                (SELECT object FROM payloads WHERE run = :run AND call = group_call)
            FROM (SELECT seq, ticket_id, actor, fit, group_call, sum(size) OVER (ORDER BY seq) - size AS before
                FROM (SELECT seq, ticket_id, actor, call AS group_call,
                    (SELECT fit FROM tickets WHERE run = :run AND id = ticket_id) AS fit,
                    (SELECT length(payload) FROM payloads WHERE run = :run AND payloads.call = groups.call) AS size
                    FROM groups WHERE run = :run AND kind = :kind AND seq > :after_seq ORDER BY seq LIMIT :limit
                ) AS next) AS page
            WHERE before < :num_bytes AND fit IS NOT NULL ORDER BY seq""",
            kind=kind,
            after_seq=after_seq,
            limit=limit,
            num_bytes=self.page_bytes,
        )
        rows = rows[: _num_within([object_ for *_, object_ in rows], self.page_bytes)]
        messages = self._unstow([(ticket_id, payload, object_) for _, ticket_id, _, _, payload, object_ in rows])
        if any(isinstance(message, BadObjectError) for message in messages):
            self._check_own_bucket()  # before anybody is blamed, and a ticket offered again
        groups: list[StoredGroup] = []
        spoiled: list[str] = []
        for (seq, ticket_id, actor, fit, _, object_), message in zip(rows, messages, strict=True):
            try:
                if isinstance(message, BadObjectError):
                    if seq > self._led_after_seq:
                        self._lost_in_a_row[actor] += 1
                    raise message
                if object_ is not None:
                    self._lost_in_a_row.pop(actor, None)
                groups.append(StoredGroup(seq, self._group(message, ticket_id, actor, fit)))
            except ValueError as e:
                logging.error("group set aside ticket=%r actor=%r: %s", ticket_id, actor, e)
                self.set_aside[actor] += 1
                spoiled.append(ticket_id)
        self._newest_seq = max([self._newest_seq, *(row[0] for row in rows)])
        if self._incarnation is not None:  # others only read
            self.reissue(spoiled)
        return groups

    def _read_on_an_older_copy(self) -> None:
        """Gives all groups numbers above those that were read, so that every reader reads them again.

        What answers after a break may be a copy of the store without its last commits. There, numbers that a reader has
        seen are free, and are given to other groups.
        """
        params = {"newest": self._newest_seq}
        shift = "(SELECT CASE WHEN last_seq > :newest THEN last_seq ELSE :newest END FROM runs WHERE run = :run)"
        before, *_ = self._write(
            self._step("SELECT last_seq FROM runs WHERE run = :run"),
            self._step(f"UPDATE groups SET seq = seq + {shift} WHERE run = :run", **params),
            self._step(f"UPDATE runs SET last_seq = last_seq + {shift} WHERE run = :run", **params),
            guarded=True,
        )
        if before[0][0] < self._newest_seq:
            logging.error(
                "store went back last_group=%d read_group=%d: it is a copy without the last commits; all groups are "
                "read again, and open tickets offered again (docs/store_care.md)",
                before[0][0],
                self._newest_seq,
            )

    @property
    @override
    def num_set_aside(self) -> int:
        return sum(self.set_aside.values())

    @property
    @override
    def lost_in_a_row(self) -> dict[str, int]:
        return self._lost_in_a_row

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
