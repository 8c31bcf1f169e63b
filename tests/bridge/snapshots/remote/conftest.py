"""What all servers here serve."""

import pytest

from tests.bridge.snapshots.served import open_writer


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "w"


@pytest.fixture
def writer(folder):
    made = open_writer(folder)
    yield made
    made.close()
