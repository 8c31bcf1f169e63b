"""A server whose last commits are gone (a standby, a restored backup), a full queue of notifications, a held lock."""

import contextlib
import os
import pathlib
import shutil
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from bridge.store.open import PostgresStore, create_run
from bridge.store.postgres import tables_and_roles
from bridge.store.store_types import StoreWentBackError
from learner.schedule import group_queue
from tests.bridge.factories import make_announcement, make_group, make_ticket
from tests.postgres import ACTOR, Server, start_server

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(data_folder: pathlib.Path):
    server = start_server(data_folder / "older-copy")
    server.stop()
    # The smallest there is: a test can fill it.
    with open(data_folder / "older-copy" / "postgresql.conf", "a") as file:
        file.write("\nmax_notify_queue_pages = 64\n")
    server.restart()
    yield server
    server.close()


class Sides:
    """A learner's and an actor's store of one run, and a copy of the server's data folder."""

    def __init__(self, server: Server, folder: pathlib.Path, run: str) -> None:
        self.server, self.folder, self.run = server, folder, run
        learner_url, actor_url = server.create_store()
        create_run(learner_url, run=run, name="n", actor_role=ACTOR)
        self.urls = learner_url, actor_url
        self.learner, self.actor = (PostgresStore(url, run=run, retry_s=30.0) for url in self.urls)
        self.copy = folder.with_name(f"{folder.name}-standby")

    def take_copy(self) -> None:
        """A backup at rest: what a standby, or a restored backup, knows."""
        self.server.stop()
        shutil.copytree(self.folder, self.copy)
        for path in (self.copy, *self.copy.rglob("*")):
            stat = self.folder.stat()
            os.chown(path, stat.st_uid, stat.st_gid)
        self.server.restart()

    def fail_over(self) -> None:
        """The copy takes the place of the server."""
        self.server.stop()
        shutil.rmtree(self.folder)
        self.copy.rename(self.folder)
        self.server.restart()

    def put(self, *ids: str) -> None:
        for id_ in ids:
            assert self.actor.put_group(make_group(make_ticket(id_, order=int(id_[1:])), actor="a"))


@pytest.fixture
def sides(server, data_folder, request):
    with contextlib.ExitStack() as parts:
        made = Sides(server, data_folder / "older-copy", f"run-{abs(hash(request.node.name))}")
        parts.callback(made.learner.close)
        parts.callback(made.actor.close)
        yield made
        server.restart()
        shutil.rmtree(made.copy, ignore_errors=True)


class Waiting:
    """Groups that arrived, in the place of an arrival policy."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def receive(self, group: Any) -> list[Any]:
        self.ids.append(group.ticket_id)
        return []

    def drop_oldest(self) -> None:
        pass


class Planner:
    """The books of tickets of which some have arrived."""

    def __init__(self, waiting: Waiting) -> None:
        self.tickets: dict[str, Any] = {}
        self._waiting = waiting

    @property
    def awaited_tickets(self) -> list[Any]:
        return [t for i, t in self.tickets.items() if i not in self._waiting.ids]

    def has_arrived(self, ticket_id: str) -> bool:
        return ticket_id in self._waiting.ids


def test_learner_reads_the_groups_and_offers_the_tickets_that_an_older_copy_lacks(sides, monkeypatch, caplog):
    monkeypatch.setattr(group_queue, "TrainingOrder", lambda *_: None)
    learner, waiting = sides.learner, Waiting()
    planner = Planner(waiting)
    learner.acquire_leadership("here", lease_s=600)
    planner.tickets = tickets = {f"t{i}": make_ticket(f"t{i}", order=i) for i in range(5)}
    learner.put_tickets([tickets[f"t{i}"] for i in range(4)])
    sides.put("t0")
    sides.take_copy()
    given: Any = SimpleNamespace(
        config=None, planner=planner, store=learner, tickets=learner, group_filter=waiting, timeline=None, on_wait=None
    )
    queue = group_queue.GroupQueueIterator(given)
    learner.put_tickets([tickets["t4"]])
    sides.put("t1", "t2")
    queue.poll()
    assert waiting.ids == ["t0", "t1", "t2"]
    sides.fail_over()
    # Numbers that the learner has read are given to other groups before it asks again.
    sides.put("t3", "t1")
    queue.poll()
    assert waiting.ids == ["t0", "t1", "t2", "t3"]  # none twice
    queue.poll()
    sides.put("t4")  # its ticket was lost, and is offered again
    queue.poll()
    assert waiting.ids == ["t0", "t1", "t2", "t3", "t4"]
    assert "store rolled back" in caplog.text


@pytest.mark.parametrize("num_lost", [1, 3])
def test_reader_gets_each_group_of_the_copy_whatever_number_it_had_read(sides, num_lost):
    learner = sides.learner
    learner.acquire_leadership("here", lease_s=600)
    learner.put_tickets([make_ticket(f"t{i}", order=i) for i in range(8)])
    sides.put("t0", "t1")
    sides.take_copy()
    sides.put(*(f"t{2 + i}" for i in range(num_lost)))
    last = learner.read_groups(after_seq=0, limit=9)[-1].seq
    sides.fail_over()
    sides.put("t7", "t6")
    read = learner.read_groups(after_seq=last, limit=9)
    assert [s.group.ticket_id for s in read] == ["t0", "t1", "t7", "t6"]
    assert learner.read_groups(after_seq=read[-1].seq, limit=9) == []
    sides.put("t5")
    assert [s.group.ticket_id for s in learner.read_groups(after_seq=read[-1].seq, limit=9)] == ["t5"]


def test_announcement_that_the_copy_lacks_is_made_again(sides):
    learner = sides.learner
    learner.acquire_leadership("here", lease_s=600)
    sides.take_copy()
    learner.announce(announcement := make_announcement())
    assert sides.actor.announced() == announcement
    sides.fail_over()
    assert sides.actor.announced() is None
    learner.read_groups(after_seq=0, limit=1)
    assert sides.actor.announced() == announcement


def test_learner_that_the_copy_does_not_know_is_told_to_start_again_and_not_that_another_leads(sides):
    sides.learner.acquire_leadership("here", lease_s=600)
    sides.take_copy()
    assert sides.learner.acquire_leadership("here", lease_s=600) == 1
    sides.fail_over()
    with pytest.raises(StoreWentBackError, match="it knows incarnation 0 of the learner, this one is 1; start again"):
        sides.learner.put_tickets([make_ticket("t0")])
    with contextlib.closing(PostgresStore(sides.urls[0], run=sides.run)) as again:
        assert again.acquire_leadership("here", lease_s=600) == 1
        assert again.put_tickets([make_ticket("t0")]) == 1


def test_restart_without_loss_gives_all_groups_again_and_none_is_lost(sides, caplog):
    learner = sides.learner
    learner.acquire_leadership("here", lease_s=600)
    learner.put_tickets([make_ticket(f"t{i}", order=i) for i in range(3)])
    sides.put("t0", "t1")
    last = learner.read_groups(after_seq=0, limit=9)[-1].seq
    sides.server.restart()
    sides.put("t2")
    read = learner.read_groups(after_seq=last, limit=9)
    assert [s.group.ticket_id for s in read] == ["t0", "t1", "t2"]
    assert "store rolled back" not in caplog.text


def test_full_queue_of_notifications_stops_no_write_of_any_run(sides):
    learner, actor = sides.learner, sides.actor
    learner.acquire_leadership("here", lease_s=600)
    learner.put_tickets([make_ticket(f"t{i}", order=i) for i in range(3)])
    with (
        psycopg.connect(sides.urls[1], autocommit=True) as holds,
        psycopg.connect(sides.urls[1], autocommit=True) as fills,
    ):
        holds.execute("SET idle_in_transaction_session_timeout = 0")
        holds.execute("LISTEN foo")
        holds.execute("BEGIN")
        holds.execute("SELECT 1")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            for _ in range(1000):
                fills.execute(
                    "SELECT count(*) FROM (SELECT pg_notify('foo', repeat('x', 7900) || g) "
                    "FROM generate_series(1, 20) g) AS told"
                )
        assert learner.put_tickets([make_ticket("t9", order=9)]) == 1
        assert [t.id for t in actor.claim("a", limit=1, lease_s=60)] == ["t0"]
        sides.put("t0", "t1")
        assert [s.group.ticket_id for s in learner.read_groups(after_seq=0, limit=9)] == ["t0", "t1"]
        learner.acknowledge(["t0"])
        learner.finish(1)
        assert learner.finished() is not None


def test_run_is_made_while_another_role_holds_the_makers_lock(sides):
    with psycopg.connect(sides.urls[1], autocommit=True) as holds:
        holds.execute("SELECT pg_advisory_lock(%s)", (tables_and_roles._MAKER_LOCK,))
        create_run(sides.urls[0], run="another", name="n", actor_role=ACTOR, retry_s=0.1)
        with contextlib.closing(PostgresStore(sides.urls[0], run="another")) as store:
            assert store.acquire_leadership("here", lease_s=60) == 0
