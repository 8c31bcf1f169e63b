"""Groups over a size go to a bucket, and the database holds references (`bridge.store.group_objects`).

An object is put before its row. What a group's end leaves behind is noted in the very transaction that ends it
(`dropped_objects`, by a trigger), and deleted after it: a learner that dies in between finds the note when it starts
again. What an actor put and gave no row is found by listing, when it is old enough.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence

from absl import logging
from typing_extensions import override

from bridge.store.group_objects import BadObjectError, GroupObjects
from bridge.store.protocol import FencedError, StoreLostError, UnfitGroupError
from bridge.store.sql.script import StoreClosedError
from bridge.store.sql.shared import SqlShared

_AT_A_TIME = 256
"""Noted objects that are deleted between two looks at the database."""
SWEEP_EVERY_S = 1800.0


class SqlObjects(SqlShared):
    """The part of a run's store that has to do with its bucket; without one all groups stay in the database."""

    _objects: GroupObjects | None = None
    _inline_bytes = 0
    _has_marked = False
    _keeper: "ObjectKeeper | None" = None

    def use_bucket(self, objects: GroupObjects, *, inline_bytes: int) -> None:
        """Puts groups of more than `inline_bytes` there from now on; once, before anything else."""
        self._objects, self._inline_bytes = objects, inline_bytes

    def check_bucket(self) -> None:
        """Looks whether the bucket here, where there is one, is the one that the learner reads.

        Raises:
          ValueError: it is another one, or it refuses us.
          StoreLostError: it could not be reached.
        """
        if self._objects is not None:
            self._objects.check_mark()

    def _mark_bucket(self) -> None:
        """Marks the bucket as this run's; where groups of the run lie there it must be marked already.

        Raises:
          ValueError: it isn't, as an empty folder is on which the shared one is not mounted; or it refuses us.
          StoreLostError: it could not be reached.
        """
        if self._objects is None:
            return
        if self._references():
            self._objects.check_own_mark()
        self._objects.mark()
        self._has_marked = True

    def _check_own_bucket(self) -> None:
        """Looks whether the bucket is still the one that this learner has marked.

        Raises:
          ValueError: its mark is missing, or it refuses us.
          StoreLostError: it could not be reached.
        """
        if self._objects is not None and self._has_marked:
            self._objects.check_own_mark()

    def delete_dropped(self) -> int:
        """Deletes the objects of groups that are gone; returns how many were noted."""
        if self._objects is None:
            return 0
        num_dropped = 0
        while rows := self._read(
            "SELECT ticket_id, object FROM dropped_objects WHERE run = :run ORDER BY object LIMIT :limit",
            limit=_AT_A_TIME,
        ):
            self._objects.delete([(ticket_id, object_) for ticket_id, object_ in rows])
            # What could not be deleted is an orphan now, and swept.
            forget = "DELETE FROM dropped_objects WHERE run = :run AND object IN [objects]"
            self._write(self._step(forget, objects=[object_ for _, object_ in rows]), locks=False)
            num_dropped += len(rows)
        return num_dropped

    def sweep_objects(self) -> int:
        """Deletes the objects that no group refers to and that are too old for one that is on its way; how many."""
        return self._objects.sweep(self._references) if self._objects is not None else 0

    @override
    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        try:
            super().close()
        finally:
            if self._objects is not None:
                self._objects.close()

    def _keep_objects(self) -> None:
        """Has a thread delete and sweep from now on, for as long as this process leads the run."""
        if self._objects is not None and self._keeper is None:
            self._keeper = ObjectKeeper(self.delete_dropped, self.sweep_objects)

    def _groups_went(self) -> None:
        if self._keeper is not None:
            self._keeper.wake()

    @contextlib.contextmanager
    def _stowed(self, ticket_id: str, message: bytes) -> Generator["Stowed"]:
        """A group's message as its row has it; an object whose row is refused for good is deleted again."""
        if self._objects is None or len(message) <= self._inline_bytes:
            yield Stowed(message, None)
            return
        stowed = Stowed(b"", str(self._objects.put(ticket_id, message)))
        row = (ticket_id, str(stowed.object))
        try:
            yield stowed
        except (KeyError, FencedError, UnfitGroupError):
            self._objects.delete([row])
            raise
        # After any other error the row may be there all the same.
        if not stowed.is_taken:
            self._objects.delete([row])

    def _unstow(self, rows: Sequence[tuple[str, bytes, str | None]]) -> list[bytes | BadObjectError]:
        """The messages of rows (ticket id, payload, reference), or what is wrong with one's object.

        Raises:
          ValueError: the bucket refuses us.
          StoreLostError: the bucket could not be reached.
        """
        referring = [(ticket_id, object_) for ticket_id, _, object_ in rows if object_ is not None]
        if self._objects is None:
            # No reason to end: any actor's role can write such a row.
            no_bucket = BadObjectError("it is in a bucket, and this run's learner has none: give both store.bucket")
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


class Stowed:
    """Where a group's bytes are: in the row, or in the object that it refers to."""

    def __init__(self, payload: bytes, object_: str | None) -> None:
        self.payload, self.object = payload, object_
        self.is_taken = False
        """Set once the row is there."""


class ObjectKeeper:
    """A thread that deletes what groups left, when it is woken and now and then."""

    def __init__(self, delete_dropped: Callable[[], int], sweep: Callable[[], int]) -> None:
        """Begins at once, with a sweep."""
        self._delete_dropped, self._sweep = delete_dropped, sweep
        self._woken, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="object-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Some groups are gone."""
        self._woken.set()

    def stop(self) -> None:
        """Ends it after what it does now; what is left is there for the next."""
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
            except (StoreLostError, OSError, ValueError) as e:  # whatever it is, learning goes on
                logging.warning("objects_left error=%s", e)
            self._woken.wait(max(1.0, sweep_at_s - time.monotonic()))
            self._woken.clear()
