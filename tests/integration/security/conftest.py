"""What the tests of attacks share: a store with two runs, and a snapshot server."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Generator

import numpy as np
import psycopg
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore, create_run
from tests.bridge.factories import make_group, make_ticket
from tests.integration.security.rig import (
    Place,
    fetch,
    fetcher,
    serving,
    weights,
)
from tests.integration.security.store_site import ACTOR, CARD, LEARNER, STRANGER, TABLES, Site
from tests.integration.security.store_site import OTHER as OTHER_RUN
from tests.integration.security.store_site import RUN as STORE_RUN
from tests.postgres import Server


@pytest.fixture(scope="module")
def database(postgres: Server) -> Generator[str]:
    name = postgres.create_database()
    for role in (LEARNER, ACTOR, STRANGER):
        postgres.create_role(role)
    admin = postgres.url(database=name)
    create_run(admin, run="first", name="", actor_role=STRANGER)
    with psycopg.connect(admin, autocommit=True) as db:
        db.execute(f"GRANT sluice_learner TO {LEARNER}")
        db.execute(f"GRANT sluice_actor TO {ACTOR}, {STRANGER}")
    yield name
    postgres.drop_database(name)


@pytest.fixture
def site(postgres: Server, database: str) -> Generator[Site]:
    learners, actors = (postgres.url(role, database) for role in (LEARNER, ACTOR))
    create_run(learners, run=STORE_RUN, name="ours", actor_role=ACTOR)
    create_run(learners, run=OTHER_RUN, name="others", actor_role=STRANGER)
    with contextlib.ExitStack() as ending:
        stores = [
            ending.enter_context(contextlib.closing(PostgresStore(url, run=run, retry_s=10.0)))
            for url, run in ((learners, STORE_RUN), (actors, STORE_RUN), (learners, OTHER_RUN))
        ]
        for store, run in ((stores[0], STORE_RUN), (stores[2], OTHER_RUN)):
            store.acquire_leadership("here", lease_s=60)
            store.put_tickets(make_ticket(f"t{i}", order=i) for i in range(6))
            store.put_group(make_group(make_ticket("t5", order=5), actor="honest"))
            store.fence("broken", "it was")
            store.put_anchors({"known": [1.0]})
            store.heartbeat(Heartbeat(process="learner", role="learner", pid=1, time_s=0.0))
            store.put_run_card(dataclasses.replace(CARD, run=run), {CARD.files[0].blake3: b"{}"})
        yield Site(postgres, database, stores[0], stores[1])
    with psycopg.connect(postgres.url(database=database), autocommit=True) as db:
        for table in TABLES[:-1]:
            db.execute(f"TRUNCATE sluice.{table}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Place]:
    with serving(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def unharmed(place: Place, tmp_path: pathlib.Path) -> Generator[Place]:
    """Whatever a test tries: afterwards an honest actor gets what was published."""
    yield place
    place.check_unharmed()
    got = fetch(fetcher(place.trust), place.announcement(), tmp_path / "honest")
    np.testing.assert_array_equal(got, weights(3))
