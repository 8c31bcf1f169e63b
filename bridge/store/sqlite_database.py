"""The SQLite file behind `sqlite`: opening, schema, transactions.

Write transactions begin with BEGIN IMMEDIATE, so there is one writer at a time over all processes
and rows are numbered in the order in which they are committed. WAL lets readers go on meanwhile;
synchronous=FULL puts a transaction on disk before it returns.
"""

import contextlib
import os
import pathlib
import sqlite3
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

APPLICATION_ID = 0x534C5543  # "SLUC", in the file's header
SCHEMA_VERSION = 3

_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE tickets (
        id TEXT PRIMARY KEY, "order" INTEGER NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,
        state TEXT NOT NULL, actor TEXT, lease_expires_s REAL, attempts INTEGER NOT NULL DEFAULT 0,
        served INTEGER NOT NULL DEFAULT 0, failure TEXT)""",  # why its last attempt made no group
    """CREATE INDEX tickets_by_order ON tickets (state, "order")""",
    # AUTOINCREMENT: without it SQLite gives the number of a deleted last row out again.
    """CREATE TABLE groups (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, ticket_id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
        payload BLOB NOT NULL)""",
    "CREATE INDEX groups_by_kind ON groups (kind, seq)",
    "CREATE TABLE heartbeats (process TEXT PRIMARY KEY, payload BLOB NOT NULL)",
    "CREATE TABLE fences (actor TEXT PRIMARY KEY, reason TEXT NOT NULL)",
    f"INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION}), ('incarnations', 0), ('reissued', 0)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)
_MIGRATIONS = {
    # A failed ticket's reason stood in the column of its actor. Heartbeats are of another form, and only signs of life.
    2: (
        "ALTER TABLE tickets ADD COLUMN failure TEXT",
        "UPDATE tickets SET failure = actor, actor = NULL WHERE state = 'failed'",
        "DELETE FROM heartbeats",
    ),
}
"""Schema version -> what makes such a file one of the next version, so that a run goes on that an older build began."""


class StoreBusyError(TimeoutError):
    """Another process held the store's write lock for longer than the busy timeout."""


class _Connection(sqlite3.Connection):
    """Python's own class takes no weak references."""


class SqliteDatabase:
    """One SQLite file, one connection a thread."""

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout_s: float) -> None:
        """Opens the file, or makes it and its folder.

        Raises:
          ValueError: the file is something else, or has a schema version that this build can't bring up to its own.
          StoreBusyError: somebody held the file's lock all the time.
        """
        self._path = pathlib.Path(path).absolute()
        self._busy_timeout_s = busy_timeout_s
        self._pid = os.getpid()
        self._local = threading.local()
        self._changed = threading.Condition()
        self._num_uses = 0
        # Weak, so that a thread's connection ends with the thread.
        self._open: weakref.WeakSet[_Connection] | None = weakref.WeakSet()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.write() as db:
                self._check_or_create(db)
            self._switch_to_wal()
        except sqlite3.DatabaseError as e:
            self.close()
            if e.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
                raise ValueError(f"{self._path} is not a Sluice store: {e}") from e
            raise
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def write(self) -> Generator[sqlite3.Connection]:
        """One write transaction: all of it is on disk afterwards, or, on any exception, none."""
        with self.read() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def read(self) -> Generator[sqlite3.Connection]:
        """This thread's connection, with SQLite's errors put into words; one statement, one snapshot."""
        connection = self._begin_use()
        try:
            yield connection
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            raise StoreBusyError(
                f"{self._path} stayed locked for {self._busy_timeout_s} s; is a process stopped "
                "in the middle of a transaction?"
            ) from e
        except OverflowError as e:
            raise ValueError(f"an integer does not fit SQLite's 64 bits: {e}") from e
        finally:
            with self._changed:
                self._num_uses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Closes every thread's connection, when what uses one has ended; nothing may begin after that.

        A thread that a cancelled coroutine left behind may be in the middle of a statement, and would crash.
        """
        if os.getpid() != self._pid:
            self._open = None
            return
        with self._changed:
            connections, self._open = self._open, None
            self._changed.wait_for(lambda: self._num_uses == 0)
        for connection in connections or ():
            connection.close()

    def _begin_use(self) -> _Connection:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self._path} was opened before a fork; each process opens its own store")
        with self._changed:
            if self._open is None:
                raise RuntimeError(f"{self._path} was closed")
            db: _Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = sqlite3.connect(
                    self._path,
                    timeout=self._busy_timeout_s,
                    isolation_level=None,  # we say BEGIN and COMMIT ourselves
                    check_same_thread=False,  # close() runs in one thread for all
                    factory=_Connection,
                )
                db.execute("PRAGMA synchronous = FULL")
                self._local.db = db
                self._open.add(db)
            self._num_uses += 1
            return db

    def _check_or_create(self, db: sqlite3.Connection) -> None:
        if _value(db, "SELECT count(*) FROM sqlite_master") == 0:
            for statement in _SCHEMA:
                db.execute(statement)
        if _value(db, "PRAGMA application_id") != APPLICATION_ID:
            raise ValueError(f"{self._path} is a database, but not a Sluice store")
        version = _value(db, "SELECT value FROM meta WHERE key = 'schema_version'")
        while version in _MIGRATIONS:
            for statement in _MIGRATIONS[version]:
                db.execute(statement)
            version += 1
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{self._path} has schema version {version}, this build reads {SCHEMA_VERSION}: "
                "finish the run with the build that began it, or start a new folder"
            )

    def _switch_to_wal(self) -> None:
        # The switch needs the file alone and does not honour the busy timeout (the first opening only).
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with self.read() as db:
                    mode = _value(db, "PRAGMA journal_mode = WAL")
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
                continue
            if mode != "wal":
                raise ValueError(f"{self._path}: its file system cannot hold a WAL database (mode {mode})")
            return


def _value(db: sqlite3.Connection, query: str) -> Any:
    row = db.execute(query).fetchone()
    return None if row is None else row[0]
