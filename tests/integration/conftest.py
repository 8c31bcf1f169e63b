"""The model that the jobs train."""

from pathlib import Path

import pytest

from tests.integration.support.models import make_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)
