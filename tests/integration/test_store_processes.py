"""Processes that open one new SQLite store at the same moment."""

import sys
from pathlib import Path

import pytest

from bridge.store.open import SqliteStore
from tests.integration.support.processes import spawn

pytestmark = pytest.mark.integration


def test_many_processes_open_a_new_store_at_once(tmp_path):
    processes = [spawn(__name__, tmp_path / "new") for _ in range(6)]
    for process in processes:
        assert process.wait(timeout=120) == 0
    store = SqliteStore(tmp_path / "new" / "store.db")
    assert store.acquire_leadership("here", lease_s=60) == 6
    store.close()


if __name__ == "__main__":
    store_ = SqliteStore(Path(sys.argv[1]) / "store.db")
    store_.acquire_leadership("here", lease_s=60)
    store_.close()
