"""A run of its own in the session's PostgreSQL database, and stores of its learner and of an actor."""

import contextlib
from collections.abc import Generator

import psycopg
import pytest

from bridge.store.open import PostgresStore
from tests.bridge.store.engines import ACTOR, LEARNER, PostgresPlace


@pytest.fixture
def place(postgres_engine, tmp_path) -> PostgresPlace:
    return postgres_engine.new_place(tmp_path)


@pytest.fixture
def learner(place) -> Generator[PostgresStore]:
    with contextlib.closing(PostgresStore(place.engine.url_of(LEARNER), run=place.run, retry_s=20.0)) as opened:
        yield opened


@pytest.fixture
def actor(place) -> Generator[PostgresStore]:
    with contextlib.closing(PostgresStore(place.engine.url_of(ACTOR), run=place.run, retry_s=20.0)) as opened:
        yield opened


@pytest.fixture
def as_actor(place) -> Generator[psycopg.Connection]:
    """A bare connection in an actor's role."""
    with psycopg.connect(place.engine.url_of(ACTOR, options="-csearch_path=sluice"), autocommit=True) as db:
        yield db
