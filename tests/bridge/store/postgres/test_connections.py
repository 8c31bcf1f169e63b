"""A server that goes and comes back, one that refuses us, and calls that are ended by `close`."""

import contextlib
import os
import threading
import time

import psycopg
import pytest

from bridge.store.open import create_run, find_run, open_store
from bridge.store.postgres import connections, listener
from bridge.store.protocol import TOPICS, StoreLostError
from bridge.store.sql.script import StoreClosedError
from tests.bridge.factories import make_group, make_ticket
from tests.bridge.store.engines import ACTOR, LEARNER
from tests.postgres import start_server

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
    ("postgresql://postgres:{secret}%zz@{host}/postgres", "can't be read"),
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
    with pytest.raises(StoreLostError, match="could not be reached for 0 s.*refused"):
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
    with pytest.raises(ValueError, match=f"2 runs are called.*{place.run}-1"):
        find_run(url, f"name of {place.run}")
    with pytest.raises(ValueError, match="no run 'unheard of'"):
        find_run(url, "unheard of")


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
    assert listener.channel_of("a") != listener.channel_of("b") and len(listener.channel_of("x" * 999)) < 63
