"""What the learner makes of a hostile actor's groups, heartbeats, claims and locks."""

import contextlib

import psycopg
import pytest

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore
from bridge.store.postgres import connections
from bridge.store.store_types import StoreLostError
from tests.bridge.factories import make_group, make_ticket
from tests.bridge.store.engines import LEARNER


@pytest.fixture
def run(place, learner) -> str:
    """Its tickets are t0 to t5; an honest actor has served the last one."""
    learner.acquire_leadership("here", lease_s=60)
    learner.put_tickets(make_ticket(f"t{i}", order=i) for i in range(6))
    learner.put_group(make_group(make_ticket("t5", order=5), actor="honest"))
    return place.run


def submit(
    db: psycopg.Connection,
    run: str,
    ticket_id: str,
    payload: bytes,
    *,
    actor: str = "hostile",
    object_: str | None = None,
) -> None:
    """A group of any bytes, within an actor's rights: as `put_group` writes it, without what it checks."""
    call = f"hostile-{ticket_id}"
    with db.transaction():
        db.execute("INSERT INTO payloads VALUES (%s, %s, %s, %s)", (run, call, payload, object_))
        db.execute("UPDATE runs SET last_seq = last_seq + 1 WHERE run = %s", (run,))
        db.execute(
            "INSERT INTO groups SELECT run, last_seq, %s, 'train', %s, 0, %s FROM runs WHERE run = %s",
            (ticket_id, actor, call, run),
        )
        db.execute(
            """UPDATE tickets SET state = 'done', actor = %s, lease_expires_s = NULL, done_by = %s
            WHERE run = %s AND id = %s""",
            (actor, call, run, ticket_id),
        )


def test_group_of_garbage_or_of_another_ticket_is_set_aside_and_its_ticket_offered_again(
    run, learner, actor, as_actor, caplog
):
    """It hands in garbage, a pickle, a group with another's id, order or name | set aside, asked for anew, counted"""
    submit(as_actor, run, "t0", b"\x80\x05cos\nsystem\n(S'id'\ntR.")
    submit(as_actor, run, "t1", b"garbage")
    submit(as_actor, run, "t2", codec.encode(make_group(make_ticket("t3", order=3), actor="hostile")))
    submit(as_actor, run, "t3", codec.encode(make_group(make_ticket("t3", order=2**62), actor="hostile")))
    submit(as_actor, run, "t4", codec.encode(make_group(make_ticket("t4", order=4), actor="victim")))
    groups = learner.read_groups(after_seq=0, limit=100)
    assert [g.group.ticket_id for g in groups] == ["t5"]  # the honest one, put before all those
    assert learner.unreadable == {"hostile": 5} and learner.num_unreadable == 5
    assert "group rejected ticket='t1' actor='hostile'" in caplog.text
    assert learner.counts() | {"reissued": 0} == {
        "open": 5,
        "claimed": 0,
        "done": 1,
        "acknowledged": 0,
        "failed": 0,
        "reissued": 0,
    }
    for i in range(5):
        assert actor.put_group(make_group(make_ticket(f"t{i}", order=i), actor="honest"))
    assert {g.group.ticket_id for g in learner.read_groups(after_seq=0, limit=100)} == {f"t{i}" for i in range(6)}


def test_group_that_refers_to_a_bucket_of_nobodys_is_set_aside(run, learner, as_actor):
    """It hands in a reference to an object, true or not, where the run has no bucket | set aside, asked for anew"""
    submit(as_actor, run, "t0", b"", object_="0" * 32 + ":100:" + "0" * 64)
    submit(as_actor, run, "t1", b"", object_="../../etc/passwd")
    assert [g.group.ticket_id for g in learner.read_groups(after_seq=0, limit=100)] == ["t5"]
    assert learner.unreadable == {"hostile": 2}
    assert learner.counts()["open"] == 5


def test_heartbeat_of_garbage_or_of_anothers_name_is_left_out(run, learner, actor, as_actor):
    """It beats with garbage or in another's name | left out of what the learner sees, the others' stay"""
    learner.heartbeat(Heartbeat(process="learner", role="learner", pid=1, time_s=0.0))
    honest = Heartbeat(process="honest", role="actor", pid=1, time_s=0.0)
    actor.heartbeat(honest)
    for process, payload in (("garbage", b"\xff\x00"), ("forged", codec.encode(honest))):
        as_actor.execute("INSERT INTO heartbeats VALUES (%s, %s, %s, now_s())", (run, process, payload))
    assert [b.process for b in learner.heartbeats()] == ["honest", "learner"]


def test_actor_role_that_fails_tickets_shows_the_learner_one_line_a_ticket(run, learner, as_actor):
    """It fails any ticket, with a reason that forges lines of a log | it may; the learner is shown one line"""
    for change in (
        "state = 'claimed', actor = 'x', lease_expires_s = 1",
        "state = 'failed', failure = E'a\\nERROR forged \\x1b[2J'",
    ):
        as_actor.execute(f"UPDATE tickets SET {change} WHERE run = '{run}' AND id = 't1'".encode())
    assert learner.failed() == {"t1": r"'a\nERROR forged \x1b[2J'"}


def test_actor_role_claims_everything_and_the_learner_takes_it_back(run, learner, actor, as_actor):
    """It claims every ticket for a day and serves none | it may; the learner fences it, and others go on at once"""
    as_actor.execute(
        """UPDATE tickets SET state = 'claimed', actor = 'greedy', lease_expires_s = now_s() + 80000
        WHERE run = %s AND state <> 'done'""",
        (run,),
    )
    assert actor.claim("honest", limit=10, lease_s=60) == []
    learner.fence("greedy", "it serves nothing")
    assert len(actor.claim("honest", limit=10, lease_s=60)) == 5


def test_actor_role_keeps_a_run_locked_and_the_learner_says_so(place, run, as_actor, monkeypatch):
    """It keeps the run's row locked in an open transaction | it may; the learner's error says who can end that"""
    monkeypatch.setitem(connections._SESSION, "lock_timeout", "100ms")
    with contextlib.closing(PostgresStore(place.engine.url_of(LEARNER), run=run, retry_s=0.2)) as learner:
        with as_actor.transaction():
            as_actor.execute("SELECT run FROM runs WHERE run = %s FOR UPDATE", (run,))
            with pytest.raises(
                StoreLostError, match=r"lock timeout: a session keeps this run locked; an administrator ends it"
            ):
                learner.withdraw(["t1"])
        learner.withdraw(["t1"])
