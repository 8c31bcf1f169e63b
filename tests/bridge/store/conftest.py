"""Stores over both engines: `engine`, a run of its own `place`, and its `clock` and `store`."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

from tests.bridge.store.engines import Engine, FakeClock, Place, PostgresEngine, SqliteEngine


@pytest.fixture(scope="session")
def postgres_engine(postgres) -> Generator[PostgresEngine]:
    with contextlib.closing(PostgresEngine(postgres)) as engine:
        yield engine


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return SqliteEngine() if request.param == "sqlite" else request.getfixturevalue("postgres_engine")


@pytest.fixture
def place(engine, tmp_path) -> Generator[Place]:
    with contextlib.closing(engine.new_place(tmp_path)) as made:
        yield made


@pytest.fixture
def clock(place) -> FakeClock:
    return place.clock


@pytest.fixture
def store(place) -> Generator[Any]:
    with contextlib.closing(place.open()) as opened:
        yield opened
