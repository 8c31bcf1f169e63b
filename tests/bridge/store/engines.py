"""Both engines behind one face, so that the very same tests run over each."""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

import psycopg

from bridge.store.open import PostgresStore, SqliteStore, create_run
from bridge.store.sql.database import Statement, Transaction
from tests.postgres import Server

LEARNER, ACTOR = "test_learner", "test_actor"
ACTORS_CALLS = (
    "claim",
    "leased",
    "renew",
    "release",
    "hand_over",
    "put_group",
    "fenced",
    "fail_ticket",
    "run_card",
    "blob",
    "register_actor",
    "engine_capacity",
    "anchors",
    "raise_anchors",
)


class FakeClock:
    """The store's clock; it stands still until it is set."""

    def __init__(self, tell: Callable[[float], object] = lambda now_s: None) -> None:
        self._tell = tell
        self.now_s = 1000.0

    @property
    def now_s(self) -> float:
        return self._now_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        self._now_s = value
        self._tell(value)

    def __call__(self) -> float:
        return self._now_s


class Place(Protocol):
    """Where one run's store is."""

    clock: FakeClock

    def open(self, **options: Any) -> Any:
        """Another store object of the same run."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    name: str

    def new_place(self, folder: pathlib.Path) -> Place:
        """A run of its own; `folder` is empty."""
        ...


class SqlitePlace:
    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.clock = path, FakeClock()

    def open(self, **options: Any) -> SqliteStore:
        return SqliteStore(self.path, clock=self.clock, **options)

    def close(self) -> None:
        pass


class SqliteEngine:
    name = "sqlite"

    def new_place(self, folder: pathlib.Path) -> SqlitePlace:
        return SqlitePlace(folder / "not" / "yet" / "there" / "store.db")


class EachInItsRole:
    """A store that makes an actor's calls in an actor's role, and all others in the learner's."""

    def __init__(self, learner: PostgresStore, actor: PostgresStore) -> None:
        self.learner, self.actor = learner, actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor if name in ACTORS_CALLS else self.learner, name)

    def close(self) -> None:
        self.actor.close()
        self.learner.close()


@dataclasses.dataclass
class PostgresPlace:
    engine: "PostgresEngine"
    run: str
    clock: FakeClock

    def open(self, **options: Any) -> Any:
        url_of = self.engine.url_of
        learner, actor = (PostgresStore(url_of(r), run=self.run, retry_s=5.0, **options) for r in (LEARNER, ACTOR))
        return EachInItsRole(learner, actor)

    def close(self) -> None:
        pass


class PostgresEngine:
    """A database in which the store's clock is the tests'; one for a whole session, a run a test."""

    name = "postgres"
    _runs = itertools.count()

    def __init__(self, server: Server) -> None:
        self.server = server
        self.database = server.create_database()
        for role in (LEARNER, ACTOR):
            server.create_role(role)
        create_run(server.url(database=self.database), run="first", name="", actor_role="sluice_actor")
        self.admin = psycopg.connect(server.url(database=self.database), autocommit=True)
        self.admin.execute(f"GRANT sluice_learner TO {LEARNER}")
        self.admin.execute(f"GRANT sluice_actor TO {ACTOR}")
        self.admin.execute("CREATE TABLE public.fake_clock AS SELECT 1000.0::float8 AS now_s")
        self.admin.execute("GRANT SELECT ON public.fake_clock TO public")
        self.admin.execute(
            "CREATE OR REPLACE FUNCTION sluice.now_s() RETURNS float8 LANGUAGE sql STABLE "
            "RETURN (SELECT now_s FROM public.fake_clock)"
        )

    def url_of(self, user: str, **params: str) -> str:
        return self.server.url(user, self.database, **params)

    def new_place(self, folder: pathlib.Path) -> PostgresPlace:
        del folder
        run = f"run-{next(self._runs)}"
        create_run(self.url_of(LEARNER), run=run, name="a name", actor_role=ACTOR)
        return PostgresPlace(self, run, FakeClock(self._set_clock))

    def close(self) -> None:
        self.admin.close()
        self.server.drop_database(self.database)

    def _set_clock(self, now_s: float) -> None:
        self.admin.execute("UPDATE public.fake_clock SET now_s = %s", (now_s,))


@contextlib.contextmanager
def opened(place: Place, **options: Any):
    with contextlib.closing(place.open(**options)) as store:
        yield store


def rows(store: Any, sql: str, **params: Any) -> list[tuple[Any, ...]]:
    """A statement of a test's own on the rows of the store's run (`:run`), in the shared text."""
    store = getattr(store, "learner", store)
    step = Statement(sql, {"run": store._run, **params})
    return store._database.write(store._run, Transaction(steps=[step], locks=False))[0]
