"""The store's file: what is refused, locks, and closing it."""

import contextlib
import sqlite3
import subprocess
import sys
import threading

import pytest

from bridge.store import sqlite_database
from bridge.store.open import SqliteStore
from bridge.store.sqlite_database import SqliteDatabase, StoreBusyError
from tests.bridge.store.test_store import claim_ids, put
from tests.integration.support.processes import wait_until


def test_file_that_is_no_store_is_refused_and_left_as_it_was(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look at its header " * 50)
    foreign = tmp_path / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE mine (x)")
    for path in (text, foreign):
        before = path.read_bytes()
        with pytest.raises(ValueError, match="not a Sluice store"):
            SqliteStore(path)
        assert path.read_bytes() == before
    with pytest.raises(ValueError, match="not a Sluice store"):
        SqliteStore(foreign)


def test_file_of_another_format_refused(tmp_path):
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = 99 WHERE key = 'format'")
    with pytest.raises(ValueError, match=r"store.db: expected format \d+, got 99\. Another build made it"):
        SqliteStore(path)


def test_lock_held_beyond_the_timeout_gives_a_clear_error(tmp_path):
    path = tmp_path / "store.db"
    with (
        contextlib.closing(SqliteStore(path, busy_timeout_s=0.05)) as store,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        put(store, "a")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError, match="locked"):
            claim_ids(store, "x")
        assert store.counts()["open"] == 1  # reading goes on
        with pytest.raises(StoreBusyError, match="locked"):
            SqliteStore(path, busy_timeout_s=0.05)
        other.execute("ROLLBACK")
        assert claim_ids(store, "x") == ["a"]


def test_switch_to_wal_waits_for_another_process_that_opens_the_new_file_too(tmp_path, monkeypatch):
    """SQLite refuses the switch at once, timeout or not, while somebody writes in the old mode."""
    real = SqliteDatabase._switch_to_wal
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:

        def switch_while_the_other_writes(self):
            other.execute("BEGIN IMMEDIATE")
            real(self)

        waits = []

        def wait(seconds):
            waits.append(seconds)
            other.execute("ROLLBACK")

        monkeypatch.setattr(SqliteDatabase, "_switch_to_wal", switch_while_the_other_writes)
        monkeypatch.setattr(sqlite_database.time, "sleep", wait)
        store = SqliteStore(tmp_path / "store.db")
        assert len(waits) == 1
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        store.close()


def test_closed_store_says_so(tmp_path):
    store = SqliteStore(tmp_path / "store.db")
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.counts()


@pytest.mark.heavy
def test_close_waits_for_what_a_left_behind_thread_does(tmp_path):
    database = SqliteDatabase(tmp_path / "store.db", busy_timeout_s=1)
    inside, is_closing, done = threading.Event(), threading.Event(), []

    def use() -> None:
        with database.transaction() as db:
            inside.set()
            is_closing.wait()
            done.append(db.execute("SELECT count(*) FROM tickets").fetchone())

    user, closer = threading.Thread(target=use), threading.Thread(target=database.close)
    user.start()
    inside.wait()
    closer.start()
    wait_until(lambda: is_closed(database), "nothing may begin any more")
    closer.join(0.3)
    waited = closer.is_alive()
    is_closing.set()
    user.join()
    closer.join()
    assert waited and done == [(0,)]


def is_closed(database: SqliteDatabase) -> bool:
    try:
        with database.connection():
            return False
    except RuntimeError:
        return True


@pytest.mark.heavy
def test_use_after_fork_refused(tmp_path):
    code = """
import os, sys
from bridge.store.open import SqliteStore
store = SqliteStore(sys.argv[1])
if os.fork() == 0:
    try:
        store.counts()
    except RuntimeError as e:
        os._exit(7 if "fork" in str(e) else 1)
    os._exit(2)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store.db")], timeout=60)
    assert run.returncode == 7


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as opened:
        yield opened


def test_file_is_durable_wal(tmp_path, store):
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with store._database.connection() as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_failed_transaction_leaves_nothing_behind(store):
    with pytest.raises(RuntimeError, match="stop"), store._database.transaction() as db:
        db.execute("INSERT INTO fences VALUES ('local', 'x', 'y')")
        raise RuntimeError("stop")
    assert store.fenced("x") is None
    assert store.acquire_leadership("here", lease_s=60) == 0
