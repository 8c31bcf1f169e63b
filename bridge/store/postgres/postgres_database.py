"""PostgreSQL engine of the store: retried transactions and LISTEN/NOTIFY.

A transaction is sent as one pipeline with BEGIN and COMMIT, so no lock waits for a client between two statements. If
the connection breaks, the outcome is unknown. The transaction then runs again and detects its earlier effect by the id
of its call (docs/design/exactly_once.md).
"""

import functools
import hashlib
import os
import random
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import psycopg
from absl import logging
from psycopg import sql
from typing_extensions import override

from bridge.store.postgres.connections import Connection, Connections, cut
from bridge.store.postgres.errors import heals, is_full, reason_of
from bridge.store.sql.database import Database, Row, Statement, StoreClosedError, Transaction, translate
from bridge.store.store_types import TOPICS, Mark, StoreLostError, SupersededLearnerError, Topic


def channel_of(run: str) -> str:
    """Returns the notification channel of a run; the payload of a notification is the topic."""
    return f"sluice_{hashlib.blake2b(run.encode(), digest_size=16).hexdigest()}"


class Listener:
    """Change counter of one run's topics."""

    def __init__(self, connections: Connections, run: str) -> None:
        """Starts listening. Changes before the connection is up count as a change of every topic."""
        self._connections, self._run = connections, run
        self._changed = threading.Condition()
        self._counts: dict[Topic, int] = dict.fromkeys(TOPICS, 0)
        self._is_closed = False
        self._connection: Connection | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="store-listener", daemon=True)
        self._thread.start()

    def mark(self) -> Mark:
        """Returns the number of changes per topic."""
        with self._changed:
            return dict(self._counts)

    def wait(self, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        """Returns when one of `topics` has changed since `mark`, on `close`, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or any(self._counts[t] != mark[t] for t in topics), timeout_s
            )

    def close(self) -> None:
        """Stops listening and wakes all waiting threads."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            connection = self._connection
        os.write(self._wake_write, b"x")
        if connection is not None:
            cut(connection)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _listen(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            began_s = time.monotonic()
            try:
                self._listen_once()
            except (psycopg.Error, OSError, RuntimeError, ValueError) as e:
                if self._is_closed:
                    return
                why = reason_of(e) if isinstance(e, psycopg.Error) else type(e).__name__
                logging.log_every_n_seconds(logging.WARNING, "store notifications not received: %s", 30, why)
            if time.monotonic() - began_s > 2 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            _wait_readable(self._wake_read, timeout_s=pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _listen_once(self) -> None:
        with self._connections.connect() as connection:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(self._run))))
            with self._changed:
                self._connection = connection
            self._count(TOPICS)  # changes before this moment were not counted
            while not self._is_closed:
                _wait_readable(connection.fileno(), self._wake_read)
                self._count({n.payload for n in connection.notifies(timeout=0) if n.payload in TOPICS})

    def _count(self, topics: Collection[Topic]) -> None:
        with self._changed:
            for topic in topics:
                self._counts[topic] += 1
            self._changed.notify_all()


def _wait_readable(*fds: int, timeout_s: float | None = None) -> None:
    """Waits until one of the descriptors can be read; unlike `select.select`, of any number."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll(None if timeout_s is None else 1000 * timeout_s)


SUPERSEDED, NO_RUN = "SL001", "SL002"  # schema.sql: lock_run
LOCKED_AT_MOST = "5s"
"""Timeout of a transaction that holds a run's lock."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_LOCK = Statement("SELECT lock_run(:run, CAST(:incarnation AS bigint), :at_most)", {})
_NOTIFY = "SELECT pg_notify(:channel, :topic) WHERE {condition}"


T = TypeVar("T")


class PostgresDatabase(Database):
    """PostgreSQL database; each process opens one per run."""

    def __init__(self, url: str, *, retry_s: float) -> None:
        """Connects lazily; passwords come from PGPASSFILE or PGPASSWORD. Raises ValueError as `Connections`."""
        self._connections = Connections(url)
        self._retry_s = retry_s
        self._num_breaks = 0
        self._lock = threading.Lock()
        self._listener: Listener | None = None

    @property
    def place(self) -> str:
        """URL of the database without secrets."""
        return self._connections.place

    @override
    def write(self, run: str, script: Transaction) -> list[list[Row]]:
        try:
            return self.retry(lambda db: _run_and_tell(db, run, script), timeout_s=script.timeout_s)
        except psycopg.Error as e:
            if e.sqlstate == SUPERSEDED and script.incarnation is not None:
                raise SupersededLearnerError.of(script.incarnation, e.diag.message_primary) from None
            raise self._in_words(e) from e

    @override
    def read(self, run: str, step: Statement, *, timeout_s: float | None = None) -> list[Row]:
        try:
            return self.retry(lambda db: _execute(db, step).fetchall(), timeout_s=timeout_s)
        except psycopg.Error as e:
            raise self._in_words(e) from e

    def retry(self, act: Callable[[Connection], T], *, timeout_s: float | None = None) -> T:
        """Returns the result of `act`, which runs again if the connection breaks.

        Raises:
          StoreLostError: the server was unreachable, or did not complete the call, for the retry time.
          StoreClosedError: `close` was called.
          ValueError: the server rejects the login.
          psycopg.Error: the server rejects the statement.
        """
        timeout_s = self._retry_s if timeout_s is None else timeout_s
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                with self._connections.borrow() as connection:
                    return act(connection)
            except psycopg.Error as e:
                if not heals(e):
                    raise
                why = reason_of(e)
                self._num_breaks += 1
                if not is_full(e):  # keep existing connections if the server allows no new ones
                    self._connections.drop_idle()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                place = self._connections.place
                raise StoreLostError(f"the store at {place} was unreachable for {timeout_s:.0f} s: {why}")
            logging.log_every_n_seconds(logging.WARNING, "store unreachable, retrying: %s", 10, why)
            # Jitter, so that all clients of a restarted server do not reconnect at the same moment.
            if self._connections.closed.wait(min(left_s, pause_s * random.uniform(0.5, 1.0))):
                raise StoreClosedError(f"the store at {self._connections.place} was closed")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    @override
    def num_breaks(self) -> int:
        return self._num_breaks

    @override
    def mark(self, run: str) -> Mark:
        return self._listen(run).mark()

    @override
    def wait(self, run: str, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        self._listen(run).wait(mark, topics, timeout_s=timeout_s)

    @override
    def close(self) -> None:
        if self._connections.is_of_another_process:
            return  # after a fork, the connections belong to the parent
        with self._lock:
            self._connections.closed.set()
            listener = self._listener
        if listener is not None:
            listener.close()
        self._connections.close()

    def _listen(self, run: str) -> Listener:
        with self._lock:
            if self._listener is None:
                if self._connections.closed.is_set():
                    raise StoreClosedError(f"the store at {self._connections.place} was closed")
                self._listener = Listener(self._connections, run)
            return self._listener

    def _in_words(self, error: psycopg.Error) -> Exception:
        if isinstance(error, psycopg.DataError):  # a NUL in a text, an integer beyond 64 bits
            return ValueError(f"PostgreSQL can't keep this: {str(error).splitlines()[0]}")
        if error.sqlstate == NO_RUN:
            return ValueError(f"{self._connections.place}: {error.diag.message_primary}")
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return PermissionError(f"{self._connections.place}: {str(error).splitlines()[0]}")
        return error


def _run_and_tell(db: Connection, run: str, script: Transaction) -> list[list[Row]]:
    """Runs a transaction; without notifications if the server's queue is full, as waiting processes also poll."""
    try:
        return _run_script(db, run, script)
    except psycopg.errors.ProgramLimitExceeded as e:  # any role that may connect can fill the queue of all databases
        logging.log_every_n_seconds(
            logging.ERROR,
            "change not announced: %s; waiting processes notice it late. End the session that listens in an open "
            "transaction (pg_stat_activity, pg_notification_queue_usage())",
            60,
            reason_of(e),
        )
    db.rollback()
    return _run_script(db, run, script, tells=False)


def _run_script(db: Connection, run: str, script: Transaction, *, tells: bool = True) -> list[list[Row]]:
    with db.pipeline():
        db.execute("BEGIN")
        for step in script.before_lock:
            _execute(db, step)
        if script.locks:
            given = {"run": run, "incarnation": script.incarnation, "at_most": LOCKED_AT_MOST}
            _execute(db, Statement(_LOCK.sql, given))
        for topic in script.changes if tells else ():
            _execute(db, _notification(run, topic, script.notify_if))
        cursors = [_execute(db, step) for step in script.steps]
        for topic, condition in script.told_after.items() if tells else ():
            _execute(db, _notification(run, topic, condition))
        db.execute("COMMIT")
    # The pipeline is complete here.
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


def _notification(run: str, topic: Topic, condition: Statement | None) -> Statement:
    asked = "true" if condition is None else f"EXISTS ({condition.sql})"
    params: Mapping[str, object] = {} if condition is None else condition.params
    return Statement(_NOTIFY.replace("{condition}", asked), {**params, "channel": channel_of(run), "topic": topic})


def _execute(db: Connection, step: Statement) -> "psycopg.Cursor[Row]":
    return db.cursor(binary=True).execute(_in_postgres(step.sql), dict(step.params))


@functools.cache
def _in_postgres(text: str) -> sql.SQL:
    form = r"= ANY (CAST(:\1 AS text[]))"
    words = translate(text.replace("%", "%%"), now="now_s()", list_form=form, parameter_form=r"%(\1)s")
    return sql.SQL(words)  # pyright: ignore[reportArgumentType] a text of ours
