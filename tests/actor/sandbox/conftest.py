"""A pool of real sandboxes, where this machine has them."""

from collections.abc import Iterator

import pytest

from actor.sandbox.pool import Sandbox
from actor.sandbox.program import SandboxUnavailableError
from actor.sandbox.self_test import check_isolation


@pytest.fixture(scope="session")
def isolated() -> None:
    """Skips where sandboxes can't be started. One that starts and does not isolate is a failure."""
    try:
        check_isolation()
    except SandboxUnavailableError as e:
        if "cannot be isolated on this machine" in str(e):
            pytest.skip(str(e))
        raise


@pytest.fixture(scope="module")
def sandbox(isolated: None) -> Iterator[Sandbox]:
    with Sandbox(num_warm=2) as one:
        yield one
