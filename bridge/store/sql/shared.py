"""What learner and actors both ask, in SQL."""

import dataclasses
import uuid
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from absl import logging
from typing_extensions import override

from bridge import codec
from bridge.published import Announcement
from bridge.store.protocol import Mark, SharedStore, Topic
from bridge.store.sql.script import Database, Row, Script, Step
from bridge.types import Heartbeat, Ticket

T = TypeVar("T", bound=codec.Message)


class SqlShared(SharedStore):
    """One run in a database."""

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """`run` is how the run is called in the database's rows."""
        self._database = database
        self._run = run
        self._max_bytes = max_message_bytes
        self._incarnation: int | None = None
        """The one that this process leads as; None: it doesn't lead, and its writes are nobody's but its caller's."""

    @override
    def mark(self) -> Mark:
        return self._database.mark(self._run)

    @override
    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        self._database.wait(self._run, mark, topics, timeout_s=timeout_s)

    @override
    def heartbeat(self, beat: Heartbeat) -> None:
        put = """INSERT INTO heartbeats (run, process, payload, time_s) VALUES (:run, :process, :payload, {now})
            ON CONFLICT (run, process) DO UPDATE SET payload = excluded.payload, time_s = excluded.time_s"""
        step = self._step(put, process=beat.process, payload=self._encode(beat))
        # An actor's is a row of its own and waits for nobody; a learner's is refused once another one leads.
        self._write(step, guarded=True, locks=self._incarnation is not None)

    @override
    def heartbeats(self) -> list[Heartbeat]:
        beats: list[Heartbeat] = []
        rows = self._read("SELECT process, payload, time_s FROM heartbeats WHERE run = :run ORDER BY process")
        for process, payload, time_s in rows:
            try:
                beat = self._decode(Heartbeat, payload)
                if beat.process != process:
                    raise ValueError(f"it says that it is {beat.process!r}")
            except codec.OtherFormatError:
                continue  # processes of another build may live in a run, and beat as they do
            except ValueError as e:
                logging.log_every_n_seconds(logging.ERROR, "heartbeat ignored process=%r: %s", 60, process, e)
            else:
                beats.append(dataclasses.replace(beat, time_s=time_s))
        return beats

    @override
    def now_s(self) -> float:
        return self._read("SELECT {now} WHERE :run <> ''")[0][0]

    @override
    def announced(self) -> Announcement | None:
        rows = self._read("SELECT payload FROM announcements WHERE run = :run")
        return self._decode(Announcement, rows[0][0]) if rows else None

    @override
    def close(self) -> None:
        self._database.close()

    def _step(self, sql: str, /, **params: Any) -> Step:
        return Step(sql, {"run": self._run, **params})

    def _read(self, sql: str, /, **params: Any) -> list[Row]:
        return self._database.read(self._run, self._step(sql, **params))

    def _write(
        self,
        *steps: Step,
        before_lock: Sequence[Step] = (),
        guarded: bool = False,
        locks: bool = True,
        changes: Collection[Topic] = (),
        notify_if: Step | None = None,
        patience_s: float | None = None,
    ) -> list[list[Row]]:
        script = Script(
            steps=steps,
            before_lock=before_lock,
            locks=locks,
            incarnation=self._incarnation if guarded else None,
            changes=changes,
            notify_if=notify_if,
            patience_s=patience_s,
        )
        return self._database.write(self._run, script)

    def _encode(self, message: codec.Message) -> bytes:
        return codec.encode(message, max_bytes=self._max_bytes)

    def _decode(self, type_: type[T], payload: bytes) -> T:
        return codec.decode(type_, payload, max_bytes=self._max_bytes)

    def _tickets(self, rows: Sequence[Row]) -> list[Ticket]:
        return [self._decode(Ticket, payload) for (payload,) in rows]


def new_call() -> str:
    """A name for one call: what it did is known by it, should it have to be made again."""
    return uuid.uuid4().hex


def check_limit(limit: int) -> None:
    """Refuses what some engine would take for "no limit"."""
    if limit < 0:
        raise ValueError(f"limit must be >= 0, got {limit}")


def check_lease(lease_s: float) -> None:
    """Refuses a lease that is over at once."""
    if not lease_s > 0:
        raise ValueError(f"lease_s must be > 0, got {lease_s}")
