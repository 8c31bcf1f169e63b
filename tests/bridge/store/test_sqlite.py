"""What only the store in a SQLite file promises."""

import contextlib
import sqlite3

import pytest

from bridge.store.open import SqliteStore


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
