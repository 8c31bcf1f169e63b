import shutil

import pytest


@pytest.fixture
def set_free(monkeypatch):
    """Sets the free bytes of every file system."""

    def set_free(num_bytes: float) -> None:
        usage = shutil._ntuple_diskusage(2 * int(num_bytes), int(num_bytes), int(num_bytes))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_free
