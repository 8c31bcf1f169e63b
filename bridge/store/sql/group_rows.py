"""Reading of groups, and garbage collection of their bucket objects.

An object is put before its row. The transaction that deletes a group records its object in `dropped_objects` (by a
trigger), and the object is deleted afterwards. A learner that dies in between finds the record at its next start.
Objects that an actor put without a row are found by listing, once they are old enough.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from absl import logging
from typing_extensions import override

from bridge import codec
from bridge.rollout_types import Group
from bridge.store.group_blobs import BadBlobError, BlobReference, GroupBlobs
from bridge.store.sql.base import SharedStore, check_limit, ticket_digest
from bridge.store.sql.database import Database, Row, Statement, StoreClosedError
from bridge.store.sql.ticket_rows import Tickets
from bridge.store.store_types import FencedError, StoredGroup, StoreLostError, UnfitGroupError

_AT_A_TIME = 256
"""Recorded objects that are deleted per database query."""
SWEEP_EVERY_S = 1800.0


class GroupBucket(SharedStore):
    """Store operations on a run's bucket. Without a bucket, all groups stay in the database."""

    _objects: GroupBlobs | None = None
    _inline_bytes = 0
    _has_marked = False
    _keeper: "BlobCollector | None" = None

    def use_bucket(self, objects: GroupBlobs, *, inline_bytes: int) -> None:
        """Puts groups of more than `inline_bytes` into the bucket from now on. Must be the first operation."""
        self._objects, self._inline_bytes = objects, inline_bytes

    def check_bucket(self) -> None:
        """Raises ValueError if the bucket, if any, is not the learner's, and StoreLostError if it is unreachable."""
        if self._objects is not None:
            self._objects.check_mark()

    def _mark_bucket(self) -> None:
        """Marks the bucket as this run's. Raises ValueError if the run has groups in a bucket but no mark.

        A mark is missing, for instance, in an empty mount point of a shared folder.
        """
        if self._objects is None:
            return
        if self._references():
            self._objects.check_own_mark()
        self._objects.mark()
        self._has_marked = True

    def delete_dropped(self) -> int:
        """Deletes the objects of deleted groups; returns the number of recorded objects."""
        if self._objects is None:
            return 0
        num_dropped = 0
        while rows := self._read(
            "SELECT ticket_id, object FROM dropped_objects WHERE run = :run ORDER BY object LIMIT :limit",
            limit=_AT_A_TIME,
        ):
            self._objects.delete([(ticket_id, object_) for ticket_id, object_ in rows])
            # Objects that could not be deleted are now orphans, which are swept.
            forget = "DELETE FROM dropped_objects WHERE run = :run AND object IN [objects]"
            self._write(self._step(forget, objects=[object_ for _, object_ in rows]), locks=False)
            num_dropped += len(rows)
        return num_dropped

    def sweep_objects(self) -> int:
        """Deletes objects without a group that are too old for an upload in progress; returns their number."""
        return self._objects.sweep(self._references) if self._objects is not None else 0

    def close(self) -> None:
        """Closes the store; its contents stay."""
        if self._keeper is not None:
            self._keeper.stop()
        try:
            super().close()
        finally:
            if self._objects is not None:
                self._objects.close()

    @override
    def _write(self, *steps: Statement, guarded: bool = False, **options: Any) -> list[list[Row]]:
        rows = super()._write(*steps, guarded=guarded, **options)
        if guarded and self._keeper is not None:
            self._keeper.wake()
        return rows

    @contextlib.contextmanager
    def _stowed(self, ticket_id: str, message: bytes) -> Generator["BlobLocation"]:
        """Puts a large message into the bucket and yields its location; deletes the object if its row is rejected."""
        if self._objects is None or len(message) <= self._inline_bytes:
            yield BlobLocation(message, None)
            return
        stowed = BlobLocation(b"", str(self._objects.put(ticket_id, message)))
        row = (ticket_id, str(stowed.object))
        try:
            yield stowed
        except (KeyError, FencedError, UnfitGroupError):
            self._objects.delete([row])
            raise
        # After any other error the row may exist.
        if not stowed.is_taken:
            self._objects.delete([row])

    def _unstow(self, rows: Sequence[tuple[str, bytes, str | None]]) -> list[bytes | BadBlobError]:
        """Returns the messages of rows (ticket id, payload, reference), or the error of a bad object."""
        referring = [(ticket_id, object_) for ticket_id, _, object_ in rows if object_ is not None]
        if self._objects is None:
            # Must not stop the learner: any actor's role can write such a row.
            no_bucket = BadBlobError("it is in a bucket, and this run's learner has none: give both store.bucket")
            return [payload if object_ is None else no_bucket for _, payload, object_ in rows]
        fetched = iter(self._objects.fetch_all(referring))
        return [payload if object_ is None else next(fetched) for _, payload, object_ in rows]

    def _references(self) -> Collection[tuple[str, str]]:
        rows = self._read(
            """SELECT groups.ticket_id, object
            FROM groups JOIN payloads ON payloads.run = groups.run AND payloads.call = groups.call
            WHERE groups.run = :run AND object IS NOT NULL"""
        )
        return [(ticket_id, object_) for ticket_id, object_ in rows]


class BlobLocation:
    """Location of a group's bytes: the row, or the object that it references."""

    def __init__(self, payload: bytes, object_: str | None) -> None:
        self.payload, self.object = payload, object_
        self.is_taken = False
        """True once the row is stored."""


class BlobCollector:
    """Thread that deletes the objects of deleted groups, when woken and every `SWEEP_EVERY_S` seconds."""

    def __init__(self, delete_dropped: Callable[[], int], sweep: Callable[[], int]) -> None:
        self._delete_dropped, self._sweep = delete_dropped, sweep
        self._woken, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="object-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Signals that groups may have been deleted."""
        self._woken.set()

    def stop(self) -> None:
        """Stops the thread after its current work; the next collector continues with the rest."""
        self._is_over = True
        self._woken.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        sweep_at_s = time.monotonic()
        while not self._is_over:
            try:
                self._delete_dropped()
                if time.monotonic() >= sweep_at_s:
                    sweep_at_s = time.monotonic() + SWEEP_EVERY_S
                    self._sweep()
            except StoreClosedError:
                return
            except (StoreLostError, OSError, ValueError) as e:  # the learner must continue after any error
                logging.warning("objects not deleted error=%s", e)
            self._woken.wait(max(1.0, sweep_at_s - time.monotonic()))
            self._woken.clear()


class GroupRows(GroupBucket, Tickets):
    """Groups for the learner. Unreadable groups are rejected, and their tickets are offered again."""

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        super().__init__(database, run=run, max_message_bytes=max_message_bytes)
        self.unreadable: collections.Counter[str] = collections.Counter()
        """Number of unreadable groups by the actor in the row; their tickets were offered again."""
        self._lost_in_a_row: collections.Counter[str] = collections.Counter()
        self._newest_seq = 0
        """Highest group number that this learner has read."""
        self.page_bytes = 2 * max_message_bytes
        """Bytes after which `read_groups` stops, so that many large groups do not fill the memory."""

    def _read_page(self, *, after_seq: int, limit: int, kind: str) -> list[StoredGroup]:
        # No group is missed: numbers are assigned under the run's lock until the commit, so no group can appear below a
        # visible one.
        check_limit(limit)
        # Subqueries instead of joins: a prepared statement keeps the plan that was made while the tables were empty,
        # and a join's plan would scan all tickets for each payload.
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
        if self._objects is not None and self._has_marked and any(isinstance(m, BadBlobError) for m in messages):
            self._objects.check_own_mark()  # before actors are blamed and tickets reissued
        groups: list[StoredGroup] = []
        spoiled: list[str] = []
        for (seq, ticket_id, actor, fit, _, object_), message in zip(rows, messages, strict=True):
            try:
                if isinstance(message, BadBlobError):
                    if seq > self._led_after_seq:
                        self._lost_in_a_row[_submitter(actor)] += 1
                    raise message
                if object_ is not None:
                    self._lost_in_a_row.pop(_submitter(actor), None)
                groups.append(StoredGroup(seq, self._group(message, ticket_id, actor, fit)))
            except ValueError as e:
                logging.error("group rejected ticket=%r actor=%r: %s", ticket_id, actor, e)
                self.unreadable[actor] += 1
                spoiled.append(ticket_id)
        self._newest_seq = max([self._newest_seq, *(row[0] for row in rows)])
        if self._incarnation is not None:  # other processes only read
            self.reissue(spoiled)
        return groups

    def _read_on_an_older_copy(self) -> None:
        """Renumbers all groups above those that were read, so that every reader reads them again.

        After a break, a copy of the store without its last commits may answer. It would reuse numbers that readers have
        seen.
        """
        raise_last = """UPDATE runs SET last_seq = (SELECT max(seq) FROM
            (SELECT last_seq AS seq UNION ALL {others}) AS numbers) WHERE run = :run"""
        before, *_ = self._write(
            self._step("SELECT last_seq FROM runs WHERE run = :run"),
            self._step(raise_last.format(others="SELECT CAST(:newest AS bigint)"), newest=self._newest_seq),
            # Only as far as needed: the numbers must not run out, however often a connection breaks.
            self._step(
                """UPDATE groups SET seq = seq + (SELECT last_seq FROM runs WHERE run = :run) + 1
                    - (SELECT min(seq) FROM groups WHERE run = :run)
                WHERE run = :run"""
            ),
            self._step(raise_last.format(others="SELECT seq FROM groups WHERE run = :run")),
            guarded=True,
        )
        if before[0][0] < self._newest_seq:
            logging.error(
                "store rolled back last_group=%d read_group=%d: it lacks the last commits; all groups are read again, "
                "and open tickets offered again (docs/production.md)",
                before[0][0],
                self._newest_seq,
            )

    @property
    def num_unreadable(self) -> int:
        """Number of groups that `read_groups` rejected as malformed or not matching their rows, and reissued."""
        return sum(self.unreadable.values())

    @property
    def lost_in_a_row(self) -> dict[str, int]:
        """Consecutive groups per actor whose bucket object was missing or corrupt.

        Counts only groups that arrived since this process became leader, because earlier ones may be in another
        learner's bucket. Callers remove an actor after they have handled it.
        """
        return self._lost_in_a_row

    def _group(self, payload: bytes, ticket_id: str, actor: str, fit: str) -> Group:
        """Decodes a row's group and repeats the checks of `put_group`, as an actor's role can write any bytes."""
        group = self._decode(Group, payload)
        if (group.ticket_id, group.actor) != (ticket_id, actor):
            raise ValueError(f"its content is of ticket {group.ticket_id!r} and actor {group.actor!r}")
        if ticket_digest(group) != fit:
            raise ValueError("its content does not match its ticket (prompt, number of rollouts, kind, round, order)")
        return group


def _submitter(actor: str) -> str:
    """Returns the actor that submitted a group, of all that sampled tokens of it (`Group.actor`)."""
    return actor.rpartition("&")[2]


def _num_within(objects: Sequence[str | None], num_bytes: int) -> int:
    """Returns the number of rows to read: up to the one whose object reaches `num_bytes`."""
    total = 0
    for i, object_ in enumerate(objects):
        if total >= num_bytes:
            return i
        if object_ is not None:
            with contextlib.suppress(BadBlobError):
                total += BlobReference.parse(object_).num_bytes
    return len(objects)
