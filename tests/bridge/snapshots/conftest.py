import pytest

from bridge.snapshots.snapshot_writer import SnapshotWriter
from tests.bridge.snapshots.written import KEYS


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def local(tmp_path):
    return tmp_path / "actor" / "local"


@pytest.fixture
def writer(folder):
    made = SnapshotWriter(folder, **KEYS, lock_timeout_s=0.05, clock=lambda: 12.5)
    yield made
    made.close()
