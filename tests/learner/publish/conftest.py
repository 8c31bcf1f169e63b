import contextlib

import pytest

from tests.learner.publish.published import Setup


@pytest.fixture
def setup(tmp_path):
    made = Setup(tmp_path)
    yield made
    made.writer.gate.set()
    for each in made.publishers:
        with contextlib.suppress(FileNotFoundError):  # closed by the test
            each.close()
