import contextlib

import pytest

from bridge.store.open import SqliteStore


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as opened:
        yield opened
