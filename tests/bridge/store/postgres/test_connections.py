"""A server that goes and comes back, one that refuses us, and calls that are ended by `close`."""

import contextlib
import os
import threading
import time

import psycopg
import pytest

from bridge.store.open import FinishedRunError, PostgresStore, create_run, find_run, namesakes, open_store
from bridge.store.postgres import connections, postgres_database
from bridge.store.sql.database import StoreClosedError
from bridge.store.store_types import TOPICS, StoreLostError
from tests.bridge.factories import make_group, make_ticket
from tests.bridge.store.engines import ACTOR, LEARNER
from tests.postgres import start_server

pytestmark = pytest.mark.heavy

SECRET = "a secret that nobody may see"


@pytest.fixture
def own_server(data_folder, postgres, tmp_path):
    """A server that a test may kill; `postgres`, so that it is skipped where none runs."""
    server = start_server(data_folder / tmp_path.name)
    yield server
    server.stop()


def cut_all(place):
    """Ends every connection of the two roles, as a restart of the server would."""
    place.engine.admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IN (%s, %s)", (LEARNER, ACTOR)
    )


@pytest.mark.heavy
def test_calls_go_on_when_connections_are_cut(place, learner, actor):
    learner.put_tickets([make_ticket("a")])
    cut_all(place)
    assert [t.id for t in actor.claim("x", limit=1, lease_s=60)] == ["a"]
    cut_all(place)
    assert actor.put_group(make_group(make_ticket("a"))) is True
    cut_all(place)
    assert learner.counts()["done"] == 1


def test_wait_hears_of_what_happened_while_its_connection_was_cut(place, learner, actor):
    actor.wait(dict.fromkeys(TOPICS, 0), TOPICS, timeout_s=60)
    mark = actor.mark()
    cut_all(place)
    learner.put_tickets([make_ticket("a")])
    actor.wait(mark, ["tickets"], timeout_s=60)
    assert [t.id for t in actor.claim("x", limit=1, lease_s=60)] == ["a"]


@pytest.mark.heavy
def test_calls_wait_for_a_server_that_is_killed_and_comes_back(own_server):
    url = own_server.url()
    create_run(url, run="r", name="n", actor_role="sluice_actor")
    with contextlib.closing(open_store(url, run="r", retry_s=60)) as store:
        store.put_tickets([make_ticket("a")])
        own_server.kill()
        got = []
        caller = threading.Thread(target=lambda: got.extend(store.claim("x", limit=1, lease_s=60)))
        caller.start()
        own_server.restart()
        caller.join()
        assert [t.id for t in got] == ["a"]
        own_server.stop()
        began_s = time.monotonic()
        ended = []
        caller = threading.Thread(target=lambda: ended.append(error_of(store.counts)))
        caller.start()
    caller.join()
    assert isinstance(ended[0], StoreClosedError) and time.monotonic() - began_s < 30


def error_of(call):
    try:
        call()
    except Exception as e:
        return e


def test_close_ends_a_call_that_waits_for_the_server(place, learner, as_actor):
    as_actor.execute("BEGIN")
    as_actor.execute("SELECT lock_run(%s, NULL, '60s')", (place.run,))
    ended = []
    caller = threading.Thread(target=lambda: ended.append(error_of(lambda: learner.put_tickets([make_ticket("a")]))))
    caller.start()
    waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
    while not place.engine.admin.execute(waiting).fetchone():
        pass
    learner.close()
    caller.join(30)
    assert isinstance(ended[0], StoreClosedError)


def test_closed_store_says_so(learner):
    learner.close()
    learner.close()
    for call in (learner.counts, learner.mark, lambda: learner.put_tickets([make_ticket("a")])):
        with pytest.raises(StoreClosedError, match="closed"):
            call()


def test_use_after_fork_refused(learner):
    learner.wait(dict.fromkeys(TOPICS, 0), TOPICS, timeout_s=60)  # it listens, too
    child = os.fork()
    if child == 0:
        error = error_of(learner.counts)
        learner.close()  # leaves the parent's connections alone
        os._exit(0 if isinstance(error, RuntimeError) and "fork" in str(error) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert learner.counts()["open"] == 0 and not learner._database._listener._connection.closed
    mark = learner.mark()
    learner.put_tickets([make_ticket("a")])
    learner.wait(mark, ["tickets"], timeout_s=60)


REFUSED = [
    ("postgresql://nobody:{secret}@{host}:{port}/postgres", 'role "nobody" does not exist.*make it'),
    ("postgresql://postgres:{secret}@{host}:{port}/nowhere", 'database "nowhere" does not exist.*CREATE DATABASE'),
    ("postgresql://postgres:{secret}@{host}:{port}/postgres?sslmode=require", "does not support SSL.*sslmode"),
    ("postgresql://postgres:{secret}@{host}:{port}/postgres?sslmode=wrong", "sslmode.*one of disable"),
    (
        "postgresql://postgres:{secret}@no.such.host.invalid/postgres?sslmode=verify-full&sslrootcert=system",
        "no.such.host.invalid.*URL",
    ),
    ("postgresql://postgres:{secret}@{host}:{port}/postgres?nonsense=1", "nonsense"),
    ("postgresql://postgres:{secret}@{host}:wrong/postgres", "port"),
    ("postgresql://postgres:{secret}%zz@{host}/postgres", "--store: expected postgresql"),
    ("mysql://postgres:{secret}@{host}/postgres", "postgresql://user@host/database"),
]


@pytest.mark.parametrize(("url", "why"), REFUSED)
def test_server_that_refuses_us_is_told_at_once_in_one_line(postgres, url, why):
    url = url.format(secret=SECRET.replace(" ", "%20"), host=postgres.host, port=postgres.port)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=why) as caught:
        open_store(url, run="r", retry_s=600)
    assert time.monotonic() - began_s < 300
    shown = "".join(map(str, (caught.value, caught.value.__cause__)))
    assert "\n" not in str(caught.value) and SECRET not in shown and SECRET.replace(" ", "%20") not in shown


def test_server_that_nobody_runs_is_tried_until_the_time_is_over(postgres):
    with pytest.raises(StoreLostError, match="was unreachable for 0 s.*refused"):
        open_store(f"postgresql://postgres@{postgres.host}:1/postgres", run="r", retry_s=0.2)


def test_refusal_of_a_server_that_let_us_in_before_is_tried_again(place, learner, monkeypatch):
    """A database in the middle of a move may know no role for a moment."""
    learner.counts()
    cut_all(place)
    real, errors = psycopg.connect, [psycopg.OperationalError('connection failed: FATAL:  role "x" does not exist')]

    def connect(*args, **options):
        if errors:
            raise errors.pop()
        return real(*args, **options)

    monkeypatch.setattr(connections.psycopg, "connect", connect)
    assert learner.counts()["open"] == 0
    assert errors == []


def test_find_run_by_name_and_by_id(place, learner):
    url = place.engine.url_of(LEARNER)
    for run in (f"{place.run}-1", f"{place.run}-2"):
        create_run(url, run=run, name=f"name of {place.run}", actor_role=ACTOR)
        create_run(url, run=run, name="put again", actor_role=ACTOR)
    assert find_run(place.engine.url_of(ACTOR), f"{place.run}-1") == f"{place.run}-1"
    with pytest.raises(ValueError, match=f"2 runs have the name.*{place.run}-1"):
        find_run(url, f"name of {place.run}")
    with pytest.raises(ValueError, match="no run 'unheard of'"):
        find_run(url, "unheard of")


def test_find_run_passes_over_those_that_are_finished(place):
    learner_url, actor_url = place.engine.url_of(LEARNER), place.engine.url_of(ACTOR)
    name, old, new = (f"{place.run}-{what}" for what in ("name", "old", "new"))

    def open_(run):
        return contextlib.closing(PostgresStore(learner_url, run=run))

    create_run(learner_url, run=old, name=name, actor_role=ACTOR)
    with open_(old) as store:
        store.acquire_leadership("here", lease_s=30)
        store.finish(7)
    for wanted in (name, old):
        with pytest.raises(FinishedRunError, match=f"run {wanted} is finished, at step 7"):
            find_run(actor_url, wanted)
    create_run(learner_url, run=new, name=name, actor_role=ACTOR)
    assert find_run(actor_url, name) == new
    assert namesakes(learner_url, name, run=new) == []
    with open_(old) as store:
        store.acquire_leadership("here", lease_s=30)  # its learner takes it up again
    assert namesakes(learner_url, name, run=new) == [old] and find_run(actor_url, old) == old
    with pytest.raises(ValueError, match="2 runs have the name"):
        find_run(actor_url, name)


def test_text_that_the_server_can_not_keep_is_a_value_error(learner):
    with pytest.raises(ValueError, match="NUL"):
        learner.fence("x", "why\0not")
    with pytest.raises(ValueError):
        learner.put_tickets([make_ticket("a", order=2**70)])


def test_listener_ends_with_the_store(learner):
    learner.mark()
    thread = learner._database._listener._thread
    learner.close()
    assert not thread.is_alive()
    assert (
        postgres_database.channel_of("a") != postgres_database.channel_of("b")
        and len(postgres_database.channel_of("x" * 999)) < 63
    )


def test_claim_that_gets_no_training_ticket_is_told_to_nobody(learner, actor):
    """Or actors that ask in vain would keep a learner awake; one that gets one wakes it."""
    learner.wait(dict.fromkeys(TOPICS, 0), TOPICS, timeout_s=60)
    learner.put_tickets([make_ticket("probe", kind="probe")])
    mark = learner.mark()
    learner.finish(1)
    learner.wait(mark, ["run"], timeout_s=60)  # notifications come in order: what was told before has come, too
    mark = learner.mark()
    assert len(actor.claim("x", limit=4, lease_s=9)) == 1 and actor.claim("x", limit=4, lease_s=9) == []
    learner.finish(2)
    learner.wait(mark, ["run"], timeout_s=60)
    assert learner.mark()["claims"] == mark["claims"]
    learner.put_tickets([make_ticket("a")])
    actor.claim("x", limit=4, lease_s=9)
    learner.wait(mark, ["claims"], timeout_s=60)
    assert learner.mark()["claims"] == mark["claims"] + 1


def block_writers(place, as_actor):
    """Until it rolls back."""
    as_actor.execute("BEGIN")
    as_actor.execute("SELECT lock_run(%s, NULL, '60s')", (place.run,))


def wait_until_one_waits(place):
    while not place.engine.admin.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
        pass


def test_calls_of_many_threads_take_turns_on_one_connection(learner, monkeypatch):
    monkeypatch.setattr(connections, "_TURN_S", 60.0)
    made = []
    real = psycopg.connect
    monkeypatch.setattr(connections.psycopg, "connect", lambda *a, **o: made.append(1) or real(*a, **o))
    learner._database._connections.drop_idle()
    start = threading.Barrier(8)

    def call():
        start.wait()
        for _ in range(5):
            learner.counts()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_call_that_takes_long_holds_up_no_other_and_what_it_took_is_closed_again(place, learner, as_actor, monkeypatch):
    block_writers(place, as_actor)
    caller = threading.Thread(target=lambda: learner.put_tickets([make_ticket("a")]))
    caller.start()
    wait_until_one_waits(place)
    assert learner.counts()["open"] == 0  # by another connection
    as_actor.execute("ROLLBACK")
    caller.join()
    kept = learner._database._connections._idle
    assert len(kept) == 2
    monkeypatch.setattr(connections, "_IDLE_S", 0.0)
    assert learner.counts()["open"] == 1
    (left,) = learner._database._connections._idle
    assert [c.closed for c, _ in kept if c is not left[0]] == [True]


@pytest.fixture
def crowded(place, postgres):
    """The URL of a role for the run, and what sets how many connections it may have."""
    role = "test_crowded"
    postgres.create_role(role)
    place.engine.admin.execute(f"GRANT sluice_actor TO {role}")
    place.engine.admin.execute(f"GRANT {ACTOR} TO {role}")

    def allow(num: int) -> None:
        place.engine.admin.execute(f"ALTER ROLE {role} CONNECTION LIMIT {num}")

    yield place.engine.url_of(role), allow
    allow(-1)


@pytest.mark.heavy
def test_server_without_a_connection_left_is_waited_for_and_says_what_to_raise(
    place, learner, as_actor, crowded, caplog
):
    url, allow = crowded
    says = "too many connections for role.*raise max_connections.*2 for each actor and learner.*docs/kubernetes.md"
    allow(1)
    with contextlib.closing(PostgresStore(url, run=place.run, retry_s=60)) as store:
        learner.put_tickets([make_ticket("a")])
        with pytest.raises(StoreLostError, match=says):
            PostgresStore(url, run=place.run, retry_s=0.0)
        pool: connections.Connections = store._database._connections  # pyright: ignore[reportAttributeAccessIssue]
        kept = pool._idle[0][0]
        block_writers(place, as_actor)
        got = []
        caller = threading.Thread(target=lambda: got.extend(store.claim("x", limit=1, lease_s=60)))
        caller.start()
        wait_until_one_waits(place)
        caplog.clear()
        other = threading.Thread(target=lambda: got.append(store.leased("y")))
        other.start()
        while "too many connections" not in caplog.text:
            pass
        as_actor.execute("ROLLBACK")
        caller.join()
        other.join()  # it had the first one's, and lost nothing
        assert [t.id for t in got if t != set()] == ["a"] and set() in got
        assert [c for c, _ in pool._idle] == [kept] and not kept.closed
        mark = store.mark()
        store.wait(mark, ["tickets"], timeout_s=0.0)
        allow(2)
        store.wait(dict.fromkeys(TOPICS, 0), TOPICS, timeout_s=60)  # as soon as it may, it listens
