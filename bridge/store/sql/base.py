"""Store statements that learner and actors share: heartbeats, announcements, fences."""

import dataclasses
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import blake3
import msgspec
from absl import logging

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Ticket, Version
from bridge.store.sql.database import Database, Row, Statement, Transaction
from bridge.store.store_types import NAME_LEASE_S, Finished, Mark, NameTakenError, Topic
from bridge.weight_types import Announcement


def ticket_digest(value: Ticket | Group) -> str:
    """Returns a hex digest of the fields that a group shares with its ticket: kind, round, order, K and the prompt."""
    num_samples = value.num_samples if isinstance(value, Ticket) else len(value.rollouts)
    head = [value.kind, int(value.round), int(value.order), num_samples]  # converts numpy integers
    prompt = value.prompt_tokens.astype("<i4", copy=False).tobytes()
    return blake3.blake3(msgspec.msgpack.encode([*head, prompt])).hexdigest(length=16)


def describe_misfit(ticket: Ticket, group: Group) -> str:
    """Returns a message on why a group does not match its ticket."""
    want = (ticket.kind, ticket.round, ticket.order, ticket.num_samples)
    got = (group.kind, group.round, group.order, len(group.rollouts))
    if got != want:
        why = f"(kind, round, order, rollouts): expected {want}, got {got}"
    else:
        why = f"its prompt differs: expected {ticket.prompt_tokens.size} tokens, got {group.prompt_tokens.size}"
    return f"group {ticket.id} does not fit its ticket: {why}"


FENCE = "SELECT reason FROM fences WHERE run = :run AND actor = :actor"


T = TypeVar("T", bound=codec.Message)


OPEN = "UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL"
"""Statement that offers tickets to any actor; callers append the `WHERE` clause."""


class SharedStore:
    """Store of one run: operations that learner and actors share.

    Transient failures of a remote store are retried with backoff for the store's retry time, followed by
    StoreLostError. A call is idempotent: it may be repeated after a lost connection.
    """

    def __init__(self, database: Database, *, run: str, max_message_bytes: int = codec.MAX_BYTES) -> None:
        self._database = database
        self._run = run
        self._max_bytes = max_message_bytes
        self._places: dict[str, str] = {}
        """Locations of actors whose names this process registered (`register_actor`)."""
        self._incarnation: int | None = None
        """Incarnation that this process leads as; None if it is not the leader, so that its writes are not guarded."""
        self._led_after_seq = 0
        """Last group when this process became leader. Older groups may be in an earlier learner's bucket."""
        self._last_read: tuple[str, Announcement] | None = None
        """Announcement that this process read last, and the call that made it."""

    def mark(self) -> Mark:
        """Returns the current change counts. Take it before reading, so that `wait` misses no change after the read."""
        return self._database.mark(self._run)

    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """Returns when a topic in `topics` may have changed since `mark`, at the latest after `timeout_s`."""
        self._database.wait(self._run, mark, topics, timeout_s=timeout_s)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Records a heartbeat of a process."""
        self._beat(beat, self._places.get(beat.process, ""))

    def _beat(self, beat: Heartbeat, place: str) -> None:
        """Records a heartbeat. Raises NameTakenError if it has a place, and a live actor elsewhere has the name."""
        put = """INSERT INTO heartbeats (run, process, payload, time_s, holder, places)
            VALUES (:run, :process, :payload, {now}, :place, :places)
            ON CONFLICT (run, process) DO UPDATE SET payload = excluded.payload, time_s = excluded.time_s,
                holder = excluded.holder, places = excluded.places
            WHERE excluded.holder = '' OR heartbeats.holder IN ('', excluded.holder)
                OR heartbeats.time_s <= {now} - :lease_s"""
        step = self._step(
            put,
            process=beat.process,
            payload=self._encode(beat),
            place=place,
            places=_places(beat),
            lease_s=NAME_LEASE_S,
        )
        ask = self._step(
            "SELECT holder, time_s FROM heartbeats WHERE run = :run AND process = :process", process=beat.process
        )
        # An actor writes its own row without the run's lock. A superseded learner's heartbeat must be rejected.
        rows = self._write(step, ask, guarded=True, locks=self._incarnation is not None)[1]
        if place and rows and rows[0][0] != place:
            raise NameTakenError(beat.process, rows[0][0], beat_s=rows[0][1])

    def heartbeats(self) -> list[Heartbeat]:
        """Returns the last heartbeat of every process, by process name. Times are the store's, not the processes'."""
        beats: list[Heartbeat] = []
        rows = self._read("SELECT process, payload, time_s FROM heartbeats WHERE run = :run ORDER BY process")
        for process, payload, time_s in rows:
            try:
                beat = self._decode(Heartbeat, payload)
                if beat.process != process:
                    raise ValueError(f"its heartbeat names process {beat.process!r}")
            except codec.OtherFormatError:
                continue  # processes of another build may serve the run
            except ValueError as e:
                logging.log_every_n_seconds(logging.ERROR, "heartbeat ignored process=%r: %s", 60, process, e)
            else:
                beats.append(dataclasses.replace(beat, time_s=time_s))
        return beats

    def now_s(self) -> float:
        """Returns the store's clock in Unix seconds, which times leases and heartbeats."""
        return self._read("SELECT {now} WHERE :run <> ''")[0][0]

    def announced(self) -> Announcement | None:
        """Returns the latest announcement; None before the first. Its payload is sent and decoded once per process."""
        last = self._last_read
        rows = self._read(
            "SELECT call, CASE WHEN call <> :known THEN payload END FROM announcements WHERE run = :run",
            known=last[0] if last else "",
        )
        if not rows:
            return None
        call, payload = rows[0]
        if last is None or payload is not None:
            last = self._last_read = call, self._decode(Announcement, payload)
        return last[1]

    def incarnation(self) -> int:
        """Returns the incarnation of the run's current or last learner; -1 before the first."""
        return next((row[0] for row in self._read("SELECT incarnation FROM runs WHERE run = :run")), -1)

    def fenced(self, actor: str) -> str | None:
        """Returns the reason why an actor is fenced; None if it is not fenced."""
        rows = self._read(FENCE, actor=actor)
        return rows[0][0] if rows else None

    def finished(self) -> Finished | None:
        """Returns the end of the run; None if the run is in progress, including a resumed run."""
        rows = self._read(
            """SELECT incarnation, finished_step, finished_s FROM runs
            WHERE run = :run AND finished_step IS NOT NULL"""
        )
        return Finished(Version(incarnation=rows[0][0], step=rows[0][1]), rows[0][2]) if rows else None

    def close(self) -> None:
        """Closes the store; its contents stay."""
        self._database.close()

    def _step(self, sql: str, /, **params: Any) -> Statement:
        return Statement(sql, {"run": self._run, **params})

    def _read(self, sql: str, /, **params: Any) -> list[Row]:
        return self._database.read(self._run, self._step(sql, **params))

    def _write(
        self,
        *steps: Statement,
        before_lock: Sequence[Statement] = (),
        guarded: bool = False,
        locks: bool = True,
        changes: Collection[Topic] = (),
        notify_if: Statement | None = None,
        told_after: Mapping[Topic, Statement] | None = None,
        timeout_s: float | None = None,
    ) -> list[list[Row]]:
        script = Transaction(
            steps=steps,
            before_lock=before_lock,
            locks=locks,
            incarnation=self._incarnation if guarded else None,
            changes=changes,
            notify_if=notify_if,
            told_after=told_after or {},
            timeout_s=timeout_s,
        )
        return self._database.write(self._run, script)

    def _change(self, sql: str, /, *, tells: bool = False, **params: object) -> None:
        self._write(self._step(sql, **params), guarded=True, changes=("tickets",) if tells else ())

    def _encode(self, message: codec.Message) -> bytes:
        return codec.encode(message, max_bytes=self._max_bytes)

    def _decode(self, type_: type[T], payload: bytes) -> T:
        return codec.decode(type_, payload, max_bytes=self._max_bytes)


def _places(beat: Heartbeat) -> int | None:
    """Returns the number of sequences that an actor's engine runs concurrently; None if it does not serve."""
    if beat.role != "actor" or beat.version is None or beat.report is None or beat.report.is_shutting_down:
        return None
    return beat.report.max_sequences


def new_request_id() -> str:
    """Returns a unique id of one call, by which a repeated call detects its earlier effect."""
    return uuid.uuid4().hex


def check_limit(limit: int) -> None:
    """Raises ValueError for a negative limit, which some engines treat as unlimited."""
    if limit < 0:
        raise ValueError(f"limit must be >= 0, got {limit}")


def check_lease(lease_s: float) -> None:
    """Raises ValueError for a lease that expires immediately."""
    if not lease_s > 0:
        raise ValueError(f"lease_s must be > 0, got {lease_s}")


def check_blob(hash_: str, content: bytes) -> None:
    """Raises ValueError if the content does not have the hash."""
    if blake3.blake3(content).hexdigest() != hash_:
        raise ValueError(f"file of hash {hash_}: its content was changed; restart the learner")
