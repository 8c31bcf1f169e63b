"""Every operation, cut before, in the middle of and after its transaction: made again, it doubles nothing.

The oracle is a run in which the same was done uncut: what it returned, and all that the store holds afterwards.
"""

import concurrent.futures
import contextlib
import itertools
import pathlib
import random
import threading
from collections.abc import Generator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from bridge.store.open import SqlStore
from bridge.store.postgres import postgres_database
from bridge.store.postgres.postgres_database import PostgresDatabase
from bridge.store.store_types import StoreLostError
from tests.integration.support import store_operations
from tests.integration.support.cutting_proxy import CuttingProxy, Direction
from tests.integration.support.processes import wait_until
from tests.integration.support.store_operations import OPERATIONS, Operation, dump_postgres
from tests.postgres import Server, start_server

pytestmark = pytest.mark.integration
EVERY = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
SIDES = ("learner", "actor")


class Bench:
    """A database whose runs are reached straight, and by a proxy that cuts."""

    _runs = itertools.count()

    def __init__(self, server: Server) -> None:
        self.server = server
        self.urls: dict[str, str] = dict(zip(SIDES, server.create_store(), strict=True))
        self.name = conninfo_to_dict(self.urls["actor"])["dbname"]
        self.connect_admin()
        self.proxy = CuttingProxy((server.host, server.port))
        self.straight = {side: PostgresDatabase(url, retry_s=60.0) for side, url in self.urls.items()}
        self.cut = {side: PostgresDatabase(self.by_proxy(side, "cut"), retry_s=60.0) for side in SIDES}
        self.mortal = {side: PostgresDatabase(self.by_proxy(side, "mortal"), retry_s=0.0) for side in SIDES}

    def connect_admin(self) -> None:
        self.admin = psycopg.connect(self.server.admin_url, dbname=self.name, autocommit=True)

    def by_proxy(self, side: str, name: str) -> str:
        old, new = f":{self.server.port}/", f":{self.proxy.port}/"
        return self.urls[side].replace(old, new) + f"?sslmode=disable&gssencmode=disable&application_name={name}-{side}"

    def close(self) -> None:
        for database in (*self.straight.values(), *self.cut.values(), *self.mortal.values()):
            database.close()
        self.proxy.close()
        self.admin.close()

    def new_run(self, operation: Operation) -> tuple[str, dict[str, SqlStore]]:
        """A run in which all is done that goes before an operation, led by the learner that did it."""
        run = f"run-{next(self._runs)}"
        self.admin.execute(
            "INSERT INTO sluice.runs (run, name, owner, actor_role) VALUES (%s, 'cut', 'test_learner', 'test_actor')",
            (run,),
        )
        stores = {side: SqlStore(database, run=run) for side, database in self.straight.items()}
        stores["learner"].acquire_leadership("here", lease_s=60)
        operation.before(stores)
        return run, stores

    def store(self, databases: dict[str, PostgresDatabase], operation: Operation, run: str, stores: Any) -> SqlStore:
        """The operation's side of a run, connected anew; what a learner leads as goes with it.

        A connection that was used has prepared its statements, and sends fewer messages than another.
        """
        databases[operation.side]._connections.drop_idle()
        store = SqlStore(databases[operation.side], run=run)
        store._incarnation = stores[operation.side]._incarnation
        store.now_s()
        return store

    def dump(self, run: str, *, after: str) -> dict[str, list[str]]:
        """All that a run holds, once who was cut off is no longer at work at the server.

        `after` is the connections' name; one that is `cut` has come back.
        """
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = %s"
        left = 1 if after.startswith("cut") else 0
        wait_until(
            lambda: self.admin.execute(count, (after, self.name)).fetchone() <= (left,),  # type: ignore[operator]
            "a cut connection's end",
            deadline_s=60,
        )
        return dump_postgres(self.admin, run)


@pytest.fixture(scope="module")
def bench(postgres: Server) -> Generator[Bench]:
    with contextlib.closing(Bench(postgres)) as made:
        yield made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_database, "_FIRST_PAUSE_S", 0.001)


def uncut(bench: Bench, operation: Operation) -> tuple[dict, dict, dict[Direction, list[str]]]:
    """What the store holds before and after an operation, and the messages that go to and fro meanwhile."""
    run, stores = bench.new_run(operation)
    after = f"cut-{operation.side}"
    before = bench.dump(run, after=after)
    store = bench.store(bench.cut, operation, run, stores)
    watched = bench.proxy.arm("to_client", 10**6)
    assert operation.call(store) == operation.want
    bench.proxy.disarm()
    return before, bench.dump(run, after=after), watched.seen


def places(seen: dict[Direction, list[str]]) -> list[tuple[Direction, int]]:
    """Where to cut: before all, and after each statement sent, and each answer."""
    ends: dict[Direction, str] = {"to_server": "ES", "to_client": "CZ"}
    found: list[tuple[Direction, int]] = [(direction, 0) for direction in ends]
    for direction, types in ends.items():
        for number, type_ in enumerate(seen[direction], start=1):
            if type_ in types:
                found.append((direction, number))
    return [place for place in found if place[1] < len(seen[place[0]])]


@EVERY
def test_operation_whose_connection_is_cut_anywhere_is_as_if_it_had_not_been(bench, operation):
    _, want, seen = uncut(bench, operation)
    where = places(seen)
    assert len(where) > 6
    num_cut = 0
    for direction, num_messages in where:
        run, stores = bench.new_run(operation)
        store = bench.store(bench.cut, operation, run, stores)
        cut = bench.proxy.arm(direction, num_messages)
        got = operation.call(store)
        bench.proxy.disarm()
        num_cut += cut.happened.is_set()
        assert (got, bench.dump(run, after=f"cut-{operation.side}")) == (operation.want, want), (
            direction,
            num_messages,
        )
    # On a busy machine the driver now and then sends a message less than it did uncut: there is nothing to cut then.
    assert num_cut >= len(where) - 2


@EVERY
def test_operation_of_a_client_that_is_gone_was_done_whole_or_not_at_all(bench, operation):
    before, after, seen = uncut(bench, operation)
    outcomes = set()
    for direction, num_messages in places(seen):
        run, stores = bench.new_run(operation)
        store = bench.store(bench.mortal, operation, run, stores)
        cut = bench.proxy.arm(direction, num_messages)
        with contextlib.suppress(StoreLostError):
            operation.call(store)
            bench.proxy.disarm()
            assert not cut.happened.is_set(), "it was cut, and the call did not fail"
        found = bench.dump(run, after=f"mortal-{operation.side}")
        assert found in (before, after), (direction, num_messages)
        outcomes.add(found == after)
    assert outcomes == {True, False} or before == after


def killing(server: Server, bench: Bench, operation: Operation, place: tuple[Direction, int]) -> tuple[Any, dict]:
    """What an operation returns, and the store holds, whose server was killed at a place."""
    run, stores = bench.new_run(operation)
    store = bench.store(bench.cut, operation, run, stores)
    reached, killed = threading.Event(), threading.Event()

    def act() -> None:
        reached.set()
        killed.wait()

    bench.proxy.arm(*place, act=act)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(operation.call, store)
        reached.wait(60)
        server.kill()  # by this thread: a server ends with the one that started it
        killed.set()
        server.restart()
        got = answer.result(60)
    bench.connect_admin()
    return got, bench.dump(run, after=f"cut-{operation.side}")


@pytest.fixture
def mortal_server(postgres: Server, data_folder: pathlib.Path, tmp_path: pathlib.Path):
    server = start_server(data_folder / tmp_path.name)
    yield server
    server.close()


def test_operation_whose_server_is_killed_somewhere_is_as_if_it_had_not_been(mortal_server):
    chance = random.Random(0)
    with contextlib.closing(Bench(mortal_server)) as bench:
        for operation in OPERATIONS:
            _, want, seen = uncut(bench, operation)
            place = chance.choice(places(seen))
            assert killing(mortal_server, bench, operation, place) == (operation.want, want), (operation.name, place)


@pytest.mark.nightly
@EVERY
def test_operation_whose_server_is_killed_anywhere_is_as_if_it_had_not_been(mortal_server, operation):
    with contextlib.closing(Bench(mortal_server)) as bench:
        _, want, seen = uncut(bench, operation)
        for place in places(seen):
            assert killing(mortal_server, bench, operation, place) == (operation.want, want), place


def take_over(stores: dict[str, SqlStore]) -> None:
    stores["actor"].claim("b", limit=1, lease_s=60)


def acknowledge(stores: dict[str, SqlStore]) -> None:
    stores["learner"].acknowledge(["t0"])


def reissue(stores: dict[str, SqlStore]) -> None:
    stores["learner"].reissue(["t0"])


def serve_again(stores: dict[str, SqlStore]) -> None:
    stores["actor"].claim("b", limit=2, lease_s=60)
    for order in (0, 1):
        assert stores["actor"].put_group(store_operations.group(order, actor="b"))


BETWEEN = (
    ("claim", take_over, {"t0": ("claimed", "a"), "t1": ("claimed", "a")}),
    ("fail_ticket", take_over, {"t0": ("claimed", "b"), "t1": ("claimed", "a")}),
    ("release", take_over, {"t0": ("claimed", "b"), "t1": ("claimed", "a")}),
    ("put_group", reissue, {"t0": ("open", None), "t1": ("claimed", "a")}),
    ("put_group", acknowledge, {"t0": ("acknowledged", None), "t1": ("claimed", "a")}),
    ("reissue", serve_again, {"t0": ("done", "b"), "t1": ("done", "b")}),
)


@pytest.mark.parametrize(("name", "between", "want"), BETWEEN, ids=[name for name, *_ in BETWEEN])
def test_operation_whose_answer_was_lost_does_nothing_again_to_what_others_did_since(bench, name, between, want):
    (operation,) = [o for o in OPERATIONS if o.name == name]
    _, _, seen = uncut(bench, operation)
    run, stores = bench.new_run(operation)
    store = bench.store(bench.cut, operation, run, stores)
    # All was sent and answered; nothing of the answer arrives, and others go on before it is asked again.
    last = len(seen["to_client"]) - 1
    bench.proxy.arm("to_client", last, act=lambda: between(stores))
    assert operation.call(store) == operation.want
    states = "SELECT id, state, actor FROM sluice.tickets WHERE run = %s AND id IN ('t0', 't1')"
    found = {id_: tuple(rest) for id_, *rest in bench.admin.execute(states, (run,)).fetchall()}
    assert found == want
    payloads = "SELECT count(*) FROM sluice.payloads WHERE run = %s AND NOT call IN (SELECT call FROM sluice.groups)"
    assert bench.admin.execute(payloads, (run,)).fetchone() == (0,)
