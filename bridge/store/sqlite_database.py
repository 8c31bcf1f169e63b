"""SQLite engine and schema of the store.

Tables have PostgreSQL's columns (`postgres/schema.sql`), including the run's id, so that both engines accept the same
statements. A file holds one run, `RUN`.

Write transactions use BEGIN IMMEDIATE. All processes together therefore have one writer at a time, and rows are
numbered in commit order. WAL does not block readers, and synchronous=FULL puts a transaction on disk before it returns.
"""

import contextlib
import functools
import json
import os
import pathlib
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator
from typing import Any

from typing_extensions import override

from bridge import codec
from bridge.store.sql.anchor_rows import higher
from bridge.store.sql.database import Database, Row, Statement, StoreClosedError, Transaction, list_names, translate
from bridge.store.sqlite_schema import APPLICATION_ID, CREATE
from bridge.store.store_types import TOPICS, Mark, SupersededLearnerError, Topic

LOOK_S = 0.005
"""Seconds between two checks of `wait` for a changed file; an unchanged file costs no query of rows."""


_TELL = """INSERT INTO changes (run, topic, number) VALUES (?, ?, 1)
    ON CONFLICT (run, topic) DO UPDATE SET number = number + 1"""


Clock = Callable[[], float]
_READING, _OFFSET = "clock_reading_us", "clock_offset_us"
_STEP_S = 1.0
"""Seconds by which a reading must exceed the stored reading to be stored. A smaller step back is not detected."""
_AFTER_STEP_S = 2.0
"""Seconds after the stored time at which the clock continues after a step back; later than any time that it
returned."""
_PUT = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


def since_boot_s() -> float:
    """Returns the seconds since this machine's boot, including time asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SqliteClock:
    """Clock of one store file. It times leases, so it advances with elapsed time and never goes back.

    All processes of a machine share the kernel's clock since boot, which cannot be set. A reboot resets it, so the
    store keeps its last reading and the offset to Unix time: store time = reading + offset. A reading below the stored
    one means a later boot or a clock that was set back. The new offset then continues from the stored time or from Unix
    time, whichever is later.
    """

    def __init__(self, reading: Clock | None = None) -> None:
        """Takes `reading`, a clock in seconds that all processes of the file share; None: `since_boot_s`."""
        self._reading: Clock = since_boot_s if reading is None else reading
        self._unix: Clock = time.time if reading is None else reading

    def look(self, db: sqlite3.Connection) -> float:
        """Returns the store's Unix time in seconds without writing."""
        reading_s, offset_s, _ = self._now(db)
        return reading_s + offset_s

    def tick(self, db: sqlite3.Connection) -> float:
        """Returns the store's Unix time in seconds and stores the reading. Requires a write transaction."""
        reading_s, offset_s, is_kept = self._now(db)
        if not is_kept:
            db.executemany(_PUT, [(_READING, round(reading_s * 1e6)), (_OFFSET, round(offset_s * 1e6))])
        return reading_s + offset_s

    def _now(self, db: sqlite3.Connection) -> tuple[float, float, bool]:
        """Returns a reading, its offset, and True if the stored reading is close enough."""
        kept = dict(db.execute("SELECT key, value FROM meta WHERE key IN (?, ?)", (_READING, _OFFSET)).fetchall())
        reading_s = self._reading()
        to_unix_s = self._unix() - reading_s
        if len(kept) < 2:
            return reading_s, to_unix_s, False
        kept_s, offset_s = kept[_READING] / 1e6, kept[_OFFSET] / 1e6
        if reading_s < kept_s - _STEP_S:
            return reading_s, max(to_unix_s, kept_s + offset_s + _AFTER_STEP_S - reading_s), False
        return reading_s, offset_s, reading_s < kept_s + _STEP_S


class StoreBusyError(TimeoutError):
    """Error for a write lock that another process held for longer than the busy timeout."""


class _Connection(sqlite3.Connection):
    """SQLite connection that supports weak references."""


class SqliteDatabase(Database):
    """SQLite file with one connection per thread."""

    def __init__(
        self, path: str | os.PathLike[str], *, busy_timeout_s: float, clock: Callable[[], float] | None = None
    ) -> None:
        """Opens the file; creates the file and its folder if missing. `clock` is as in `SqliteClock`.

        Raises ValueError if the file is not a store, or has another `codec.FORMAT`, and StoreBusyError if the file
        stayed locked.
        """
        self._path = pathlib.Path(path).absolute()
        self._busy_timeout_s = busy_timeout_s
        self._clock = SqliteClock(clock)
        self._watch_lock = threading.Lock()
        self._watcher: _Connection | None = None
        self._seen_version = 0
        self._counts: dict[tuple[str, str], int] = {}
        """Number of notifications per (run, topic), as of `_seen_version` of the file."""
        self._pid = os.getpid()
        self._local = threading.local()
        self._changed = threading.Condition()
        self._num_uses = 0
        # Weak references, so that a thread's connection closes with the thread.
        self._open: weakref.WeakSet[_Connection] | None = weakref.WeakSet()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.transaction() as db:
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

    @override
    def write(self, run: str, script: Transaction) -> list[list[Row]]:
        with self.transaction() as db:
            now_s = self._clock.tick(db)
            if script.incarnation is not None:
                _refuse_older_incarnation(db, run, script.incarnation)
            for step in script.before_lock:
                _execute(db, step, now_s)
            is_told = script.notify_if is None or bool(_execute(db, script.notify_if, now_s))
            told = list(script.changes) if is_told else []
            rows = [_execute(db, step, now_s) for step in script.steps]
            told += [topic for topic, asked in script.told_after.items() if _execute(db, asked, now_s)]
            db.executemany(_TELL, [(run, topic) for topic in told])
            return rows

    @override
    def read(self, run: str, step: Statement, *, timeout_s: float | None = None) -> list[Row]:
        del timeout_s  # readers never wait
        with self.connection() as db:
            return _execute(db, step, self._clock.look(db))

    @property
    @override
    def num_breaks(self) -> int:
        return 0

    @override
    def mark(self, run: str) -> Mark:
        return self._look(run)

    @override
    def wait(self, run: str, mark: Mark, topics: Collection[Topic], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(StoreClosedError):
            while not self._has_changed(run, mark, topics):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._open is None, min(left_s, LOOK_S))

    @contextlib.contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Runs a write transaction: on disk afterwards, or rolled back after any exception."""
        with self.connection() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def connection(self) -> Generator[sqlite3.Connection]:
        """Yields this thread's connection and translates SQLite's errors. Each statement reads one snapshot."""
        connection = self._begin_use()
        try:
            yield connection
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            raise StoreBusyError(
                f"{self._path} stayed locked for {self._busy_timeout_s} s; check for a suspended process "
                "with an open transaction"
            ) from e
        except OverflowError as e:
            raise ValueError(f"an integer does not fit SQLite's 64 bits: {e}") from e
        finally:
            with self._changed:
                self._num_uses -= 1
                self._changed.notify_all()

    @override
    def close(self) -> None:
        """Closes all connections once no thread is in a statement, which would crash; later uses raise an error."""
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
                raise StoreClosedError(f"{self._path} was closed")
            db: _Connection | None = getattr(self._local, "db", None)
            if db is None:
                db = self._local.db = self._connect()
                self._open.add(db)
            self._num_uses += 1
            return db

    def _connect(self) -> _Connection:
        db = sqlite3.connect(
            self._path,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # transactions are explicit
            check_same_thread=False,  # close() runs in one thread for all
            factory=_Connection,
        )
        db.execute("PRAGMA synchronous = FULL")
        db.create_function("higher", 2, higher, deterministic=True)
        return db

    def _has_changed(self, run: str, mark: Mark, topics: Collection[Topic]) -> bool:
        now = self._look(run)
        return any(now[t] != mark[t] for t in topics)

    def _look(self, run: str) -> Mark:
        """Returns 1 + notifications per topic, by a connection that never writes: data_version shows other commits."""
        with self._watch_lock, self.connection():
            if self._watcher is None:
                self._watcher = self._connect()
                with self._changed:
                    if self._open is not None:
                        self._open.add(self._watcher)
            version = _value(self._watcher, "PRAGMA data_version")
            if version != self._seen_version:
                # Read the version first: a commit in between changes it, and the next look reads again.
                self._counts = {
                    (r, t): n for r, t, n in self._watcher.execute("SELECT run, topic, number FROM changes")
                }
                self._seen_version = version
            return {topic: 1 + self._counts.get((run, topic), 0) for topic in TOPICS}

    def _check_or_create(self, db: sqlite3.Connection) -> None:
        if _value(db, "SELECT count(*) FROM sqlite_master") == 0:
            for statement in CREATE:
                db.execute(statement)
        if _value(db, "PRAGMA application_id") != APPLICATION_ID:
            raise ValueError(f"{self._path} is a database but not a Sluice store")
        number = _value(db, "SELECT value FROM meta WHERE key = 'format'")
        if number != codec.FORMAT:
            raise codec.OtherFormatError.of(str(self._path), number or "none")

    def _switch_to_wal(self) -> None:
        # The switch needs exclusive access and ignores the busy timeout. Happens only when the file is created.
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with self.connection() as db:
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


@functools.cache
def _in_sqlite(sql: str) -> tuple[str, tuple[str, ...]]:
    """Returns a shared statement in SQLite's dialect, and its parameters that are passed as JSON."""
    form = r"IN (SELECT value FROM json_each(:\1))"
    return translate(sql, now=":now_s", list_form=form, parameter_form=r":\1"), tuple(list_names(sql))


def _execute(db: sqlite3.Connection, step: Statement, now_s: float) -> list[Row]:
    sql, lists = _in_sqlite(step.sql)
    return db.execute(sql, {**step.params, "now_s": now_s, **{n: json.dumps(step.params[n]) for n in lists}}).fetchall()


def _refuse_older_incarnation(db: sqlite3.Connection, run: str, incarnation: int) -> None:
    (leading,) = db.execute("SELECT incarnation FROM runs WHERE run = ?", (run,)).fetchone()
    if leading != incarnation:
        raise SupersededLearnerError.of(incarnation, leading)
