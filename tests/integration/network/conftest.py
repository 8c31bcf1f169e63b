"""One network with its store for all tests here: each test is a run of its own name in it."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.network.cluster import Cluster, cluster
from tests.integration.network.namespaces import HOSTS, network
from tests.integration.network.places import Places, places

SLOW = "slow"
SLOW_BYTES_PER_S = 1_000_000
NewCluster = Callable[..., AbstractContextManager[Cluster]]


@pytest.fixture(scope="session")
def where() -> Generator[Places]:
    """Learner, store, actors, and a machine that the learner's snapshots reach at 1 MB/s."""
    with network((*HOSTS, SLOW), slow_legs={("learner", SLOW): SLOW_BYTES_PER_S}) as net, places(net) as made:
        yield made


@pytest.fixture
def new_cluster(where: Places, tmp_path: Path, request: pytest.FixtureRequest) -> NewCluster:
    """Starts a run of the test's own name; keywords are `Setting`'s."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[-40:].strip("-")

    def new(**told: Any) -> AbstractContextManager[Cluster]:
        return cluster(where, tmp_path, name, **told)

    return new
