"""One network with its store for all tests here: each test is a run of its own name in it."""

from collections.abc import Generator

import pytest

from tests.integration.network.namespaces import HOSTS, network
from tests.integration.network.places import Places, places


@pytest.fixture(scope="session")
def where() -> Generator[Places]:
    """Learner, store and actors, each on a machine of its own."""
    with network(HOSTS) as net, places(net) as made:
        yield made
