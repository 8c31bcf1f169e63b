"""What the learner makes of a hostile actor's groups, heartbeats, claims and locks."""

import contextlib

import pytest

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore
from bridge.store.postgres import connections
from bridge.store.store_types import StoreLostError
from tests.bridge.factories import make_group, make_ticket
from tests.integration.security.store_site import ACTOR, LEARNER, RUN, Site

pytestmark = pytest.mark.integration


def submit(site: Site, ticket_id: str, payload: bytes, *, actor: str = "hostile", object_: str | None = None) -> None:
    """A group of any bytes, within an actor's rights: as `put_group` writes it, without what it checks."""
    with site.connect(ACTOR, autocommit=False) as db:
        call = f"hostile-{ticket_id}"
        db.execute("INSERT INTO payloads VALUES (%s, %s, %s, %s)", (RUN, call, payload, object_))
        db.execute("UPDATE runs SET last_seq = last_seq + 1 WHERE run = %s", (RUN,))
        db.execute(
            "INSERT INTO groups SELECT run, last_seq, %s, 'train', %s, 0, %s FROM runs WHERE run = %s",
            (ticket_id, actor, call, RUN),
        )
        db.execute(
            "UPDATE tickets SET state = 'done', actor = %s, lease_expires_s = NULL, done_by = %s WHERE id = %s",
            (actor, call, ticket_id),
        )
        db.commit()


def test_group_of_garbage_or_of_another_ticket_is_set_aside_and_its_ticket_offered_again(site, caplog):
    """It hands in garbage, a pickle, a group with another's id, order or name | set aside, asked for anew, counted"""
    submit(site, "t0", b"\x80\x05cos\nsystem\n(S'id'\ntR.")
    submit(site, "t1", b"garbage")
    submit(site, "t2", codec.encode(make_group(make_ticket("t3", order=3), actor="hostile")))
    submit(site, "t3", codec.encode(make_group(make_ticket("t3", order=2**62), actor="hostile")))
    submit(site, "t4", codec.encode(make_group(make_ticket("t4", order=4), actor="victim")))
    groups = site.learner.read_groups(after_seq=0, limit=100)
    assert [g.group.ticket_id for g in groups] == ["t5"]  # the honest one, put before all those
    assert site.learner.unreadable == {"hostile": 5} and site.learner.num_unreadable == 5
    assert "group rejected ticket='t1' actor='hostile'" in caplog.text
    assert site.learner.counts() | {"reissued": 0} == {
        "open": 5,
        "claimed": 0,
        "done": 1,
        "acknowledged": 0,
        "failed": 0,
        "reissued": 0,
    }
    for i in range(5):
        assert site.actor.put_group(make_group(make_ticket(f"t{i}", order=i), actor="honest"))
    assert {g.group.ticket_id for g in site.learner.read_groups(after_seq=0, limit=100)} == {f"t{i}" for i in range(6)}


def test_group_that_refers_to_a_bucket_of_nobodys_is_set_aside(site):
    """It hands in a reference to an object, true or not, where the run has no bucket | set aside, asked for anew"""
    submit(site, "t0", b"", object_="0" * 32 + ":100:" + "0" * 64)
    submit(site, "t1", b"", object_="../../etc/passwd")
    assert [g.group.ticket_id for g in site.learner.read_groups(after_seq=0, limit=100)] == ["t5"]
    assert site.learner.unreadable == {"hostile": 2}
    assert site.learner.counts()["open"] == 5


def test_heartbeat_of_garbage_or_of_anothers_name_is_left_out(site):
    """It beats with garbage or in another's name | left out of what the learner sees, the others' stay"""
    site.actor.heartbeat(Heartbeat(process="honest", role="actor", pid=1, time_s=0.0))
    forged = codec.encode(Heartbeat(process="honest", role="actor", pid=1, time_s=0.0))
    with site.connect(ACTOR) as db:
        for process, payload in (("garbage", b"\xff\x00"), ("forged", forged)):
            db.execute("INSERT INTO heartbeats VALUES (%s, %s, %s, now_s())", (RUN, process, payload))
    assert [b.process for b in site.learner.heartbeats()] == ["honest", "learner"]


def test_actor_role_that_fails_tickets_shows_the_learner_one_line_a_ticket(site):
    """It fails any ticket, with a reason that forges lines of a log | it may; the learner is shown one line"""
    with site.connect(ACTOR) as db:
        db.execute("UPDATE tickets SET state = 'claimed', actor = 'x', lease_expires_s = 1 WHERE id = 't1'")
        db.execute("UPDATE tickets SET state = 'failed', failure = E'a\\nERROR forged \\x1b[2J' WHERE id = 't1'")
    assert site.learner.failed() == {"t1": r"'a\nERROR forged \x1b[2J'"}


def test_actor_role_claims_everything_and_the_learner_takes_it_back(site):
    """It claims every ticket for a day and serves none | it may; the learner fences it, and others go on at once"""
    with site.connect(ACTOR) as db:
        db.execute(
            """UPDATE tickets SET state = 'claimed', actor = 'greedy', lease_expires_s = now_s() + 80000
            WHERE state <> 'done'"""
        )
    assert site.actor.claim("honest", limit=10, lease_s=60) == []
    site.learner.fence("greedy", "it serves nothing")
    assert len(site.actor.claim("honest", limit=10, lease_s=60)) == 5


def test_actor_role_keeps_a_run_locked_and_the_learner_says_so(site, monkeypatch):
    """It keeps the run's row locked in an open transaction | it may; the learner's error says who can end that"""
    monkeypatch.setitem(connections._SESSION, "lock_timeout", "100ms")
    url = site.server.url(LEARNER, site.database)
    with contextlib.closing(PostgresStore(url, run=RUN, retry_s=0.2)) as learner, site.connect(ACTOR) as db:
        db.execute("BEGIN")
        db.execute("SELECT run FROM runs FOR UPDATE")
        with pytest.raises(
            StoreLostError, match=r"lock timeout: a session keeps this run locked; an administrator ends it"
        ):
            learner.withdraw(["t1"])
        db.execute("ROLLBACK")
        learner.withdraw(["t1"])
