"""What an actor's role in PostgreSQL may not do, by our own calls and by any SQL; and what it can still do."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator

import blake3
import psycopg
import pytest

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore, create_run
from bridge.store.postgres import connections
from bridge.store.store_types import FencedError, StoreLostError
from bridge.weight_types import CardFile, RunCard
from tests.bridge.factories import make_group, make_ticket
from tests.postgres import Server

pytestmark = pytest.mark.integration

LEARNER, ACTOR, STRANGER = "security_learner", "security_actor", "security_stranger"
RUN, OTHER = "run-of-ours", "run-of-others"
TABLES = (
    "runs",
    "restores",
    "tickets",
    "groups",
    "payloads",
    "heartbeats",
    "serving",
    "fences",
    "announcements",
    "cards",
    "blobs",
    "anchors",
    "format",
)

CARD = RunCard(
    run=RUN,
    name="n",
    config="{}",
    files=(CardFile(name="config.json", num_bytes=2, blake3=blake3.blake3(b"{}").hexdigest()),),
    tensors=(),
    sluice="1",
    vllm="",
)


@dataclasses.dataclass
class Site:
    """A store of two runs; the actor's role serves one of them."""

    server: Server
    database: str
    learner: PostgresStore
    actor: PostgresStore

    def connect(self, role: str, *, autocommit: bool = True) -> psycopg.Connection:
        """Any SQL in a role."""
        url = self.server.url(role, self.database)
        return psycopg.connect(url, autocommit=autocommit, options="-c search_path=sluice,pg_temp")

    def digest(self) -> str:
        """Of all that is stored, and of the rules it is under, as the superuser sees them."""
        with self.connect("postgres") as db:
            rows = [db.execute(f"SELECT * FROM sluice.{table} t ORDER BY t::text").fetchall() for table in TABLES]
            rules = """SELECT oid::regproc::text || prosrc || proowner || prosecdef FROM pg_proc
                WHERE pronamespace = 'sluice'::regnamespace UNION ALL
                SELECT relname || relrowsecurity || relforcerowsecurity || coalesce(relacl::text, '') || relowner
                FROM pg_class WHERE relnamespace = 'sluice'::regnamespace UNION ALL
                SELECT polname || coalesce(polqual::text, '') FROM pg_policy UNION ALL
                SELECT tgname || tgenabled::text FROM pg_trigger WHERE NOT tgisinternal UNION ALL
                SELECT roleid || ' ' || member FROM pg_auth_members ORDER BY 1"""
            return hashlib.sha256(repr([rows, db.execute(rules).fetchall()]).encode()).hexdigest()


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
    create_run(learners, run=RUN, name="ours", actor_role=ACTOR)
    create_run(learners, run=OTHER, name="others", actor_role=STRANGER)
    with contextlib.ExitStack() as ending:
        stores = [
            ending.enter_context(contextlib.closing(PostgresStore(url, run=run, retry_s=10.0)))
            for url, run in ((learners, RUN), (actors, RUN), (learners, OTHER))
        ]
        for store, run in ((stores[0], RUN), (stores[2], OTHER)):
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


def refused(site: Site, statements: dict[str, str], *, role: str = ACTOR) -> None:
    """Each statement fails for want of rights, or touches nothing; what is stored stays as it was."""
    before = site.digest()
    for statement, said in statements.items():
        with site.connect(role) as db:
            try:
                cursor = db.execute(statement.encode())
            except psycopg.Error as e:
                assert said in str(e), f"{statement}: {e}"
            else:
                assert said == "nothing" and (cursor.rowcount == 0 or cursor.fetchall() == [(0,)]), statement
        assert site.digest() == before, statement


DENIED, RULE, POLICY, OWNER = (
    "permission denied",
    "only the run's learner may",
    "row-level security",
    "must be owner",
)


def test_actor_role_reads_another_run_refused(site):
    """An actor's role reads another run's tickets, groups, weights' announcements or files | it sees no row of it"""
    refused(
        site,
        {
            f"SELECT count(*) FROM {table} WHERE run = '{OTHER}'": "nothing"
            for table in ("tickets", "groups", "heartbeats", "serving", "fences", "announcements", "cards", "blobs")
        }
        | {f"SELECT count(run) FROM runs WHERE run = '{OTHER}'": "nothing"}
        | {"SELECT payload FROM payloads": DENIED, "SELECT * FROM restores": DENIED, "SELECT holder FROM runs": DENIED}
        | {f"INSERT INTO payloads VALUES ('{OTHER}', 'c', 'x')": POLICY}
        | {f"UPDATE tickets SET state = 'claimed' WHERE run = '{OTHER}'": "nothing"}
        | {f"SELECT lock_run('{OTHER}', NULL, '0')": ""},
    )
    with pytest.raises(ValueError, match="may not serve it"):
        PostgresStore(site.server.url(ACTOR, site.database), run=OTHER, retry_s=5.0)


LEARNERS_CALLS: dict[str, Callable[[PostgresStore], object]] = {
    "acquire_leadership": lambda s: s.acquire_leadership("elsewhere", lease_s=60),
    "put_tickets": lambda s: s.put_tickets([make_ticket("new")]),
    "acknowledge": lambda s: s.acknowledge(["t5"]),
    "reissue": lambda s: s.reissue(["t5"]),
    "withdraw": lambda s: s.withdraw(["t1"]),
    "withdraw_pinned": lambda s: s.withdraw_pinned(),
    "roll_back": lambda s: s.roll_back(["t1"], next_order=0, step=0),
    "fence": lambda s: s.fence("honest", "why not"),
    "unfence": lambda s: s.unfence("broken"),
    "record_restore": lambda s: s.record_restore(0, 0),
    "restores": lambda s: s.restores(),
    "read_groups": lambda s: s.read_groups(after_seq=0, limit=10),
    "put_run_card": lambda s: s.put_run_card(CARD, {}),
    "heartbeat as the learner": lambda s: s.heartbeat(Heartbeat(process="learner", role="learner", pid=2, time_s=0.0)),
}


@pytest.mark.parametrize("call", LEARNERS_CALLS)
def test_actor_role_makes_a_call_of_the_learner_refused(site, call):
    """An actor's role makes a call that only the learner may (lead, issue, acknowledge, fence...) | PermissionError"""
    before = site.digest()
    with pytest.raises(
        PermissionError, match=f"{ACTOR}.*(permission denied|row-level security|only the run's learner)"
    ):
        LEARNERS_CALLS[call](site.actor)
    assert site.digest() == before


def test_actor_role_writes_what_is_the_learners_refused(site):
    """Its SQL issues, acknowledges, withdraws, fences, announces, deletes groups or leads | permission denied"""
    refused(
        site,
        {
            f"INSERT INTO tickets (run, id) VALUES ('{RUN}', 'mine')": DENIED,
            "UPDATE tickets SET state = 'acknowledged' WHERE id = 't5'": RULE,
            "UPDATE tickets SET state = 'open' WHERE id = 't5'": RULE,
            "UPDATE tickets SET state = 'done' WHERE id = 't1'": RULE,
            "UPDATE tickets SET payload = ''": DENIED,
            "UPDATE tickets SET fit = ''": DENIED,
            "UPDATE tickets SET only_for = 'me'": DENIED,
            "UPDATE tickets SET run = 'x'": DENIED,
            "UPDATE tickets SET attempts = 99 WHERE id = 't1'": RULE,
            "DELETE FROM tickets": DENIED,
            "UPDATE groups SET actor = 'me'": DENIED,
            "DELETE FROM groups": DENIED,
            "UPDATE payloads SET payload = ''": DENIED,
            "DELETE FROM payloads": "nothing",
            "INSERT INTO fences VALUES ('run', 'honest', 'why not')": DENIED,
            "DELETE FROM fences": DENIED,
            "INSERT INTO announcements VALUES ('run', 9, 9, '', '')": DENIED,
            "UPDATE serving SET sizes = '1:1000000'": DENIED,
            "INSERT INTO serving VALUES ('run', 0, '')": DENIED,
            "DELETE FROM serving": DENIED,
            "UPDATE cards SET payload = ''": DENIED,
            "UPDATE blobs SET content = ''": DENIED,
            "INSERT INTO restores VALUES ('run', 0, 0)": DENIED,
            "UPDATE runs SET incarnation = 99": DENIED,
            "UPDATE runs SET holder = 'me'": DENIED,
            "UPDATE runs SET finished_step = 1": DENIED,
            "UPDATE runs SET owner = current_user": DENIED,
            "UPDATE runs SET actor_role = 'public'": DENIED,
            "UPDATE runs SET last_seq = 1000000": RULE,
            "UPDATE runs SET reissued = 1000000": RULE,
            f"INSERT INTO runs (run, name, actor_role) VALUES ('mine', '', '{ACTOR}')": DENIED,
            "DELETE FROM runs": DENIED,
            "DELETE FROM heartbeats": DENIED,
            "UPDATE heartbeats SET payload = '' WHERE process = 'learner'": "nothing",
            "TRUNCATE groups": DENIED,
            "UPDATE format SET number = 9": DENIED,
        },
    )


def test_actor_role_becomes_another_or_changes_the_rules_refused(site):
    """It takes another role, alters functions, triggers or policies, or turns them off | permission denied"""
    refused(
        site,
        {
            "SET ROLE sluice_learner": DENIED,
            f"SET ROLE {LEARNER}": DENIED,
            "SET SESSION AUTHORIZATION postgres": DENIED,
            f"GRANT sluice_learner TO {ACTOR}": DENIED,
            f"ALTER ROLE {ACTOR} SUPERUSER": DENIED,
            f"ALTER ROLE {LEARNER} PASSWORD 'x'": DENIED,
            "CREATE OR REPLACE FUNCTION sluice.owns(this_run text) RETURNS boolean LANGUAGE sql RETURN true": DENIED,
            "CREATE OR REPLACE FUNCTION sluice.now_s() RETURNS float8 LANGUAGE sql STABLE RETURN 0": DENIED,
            "DROP FUNCTION sluice.check_ticket() CASCADE": OWNER,
            "ALTER TABLE sluice.tickets DISABLE ROW LEVEL SECURITY": OWNER,
            "ALTER TABLE sluice.tickets DISABLE TRIGGER ALL": OWNER,
            "DROP POLICY learner ON sluice.tickets": OWNER,
            "CREATE POLICY mine ON sluice.tickets USING (true)": OWNER,
            "SET session_replication_role = replica": DENIED,
            f"SET row_security = off; SELECT count(*) FROM sluice.tickets WHERE run = '{OTHER}'": POLICY,
            "CREATE TABLE sluice.mine (x int)": DENIED,
            "CREATE TABLE public.mine (x int)": DENIED,
            "CREATE TRIGGER mine BEFORE UPDATE ON tickets FOR EACH ROW EXECUTE FUNCTION sluice.check_run()": DENIED,
        },
    )


def test_actor_role_reaches_out_of_the_database_refused(site):
    """It reads the server's files, starts programs, ends or watches the learner's session | permission denied"""
    learners = f"FROM pg_stat_activity WHERE usename = '{LEARNER}'"
    refused(
        site,
        {
            "COPY (SELECT 1) TO PROGRAM 'id'": DENIED,
            "COPY sluice.format FROM '/etc/hostname'": DENIED,
            "SELECT pg_read_file('/etc/passwd')": DENIED,
            "SELECT pg_ls_dir('.')": DENIED,
            "SELECT rolpassword FROM pg_authid": DENIED,
            f"SELECT pg_terminate_backend(pid) {learners}": DENIED,
            f"SELECT pg_cancel_backend(pid) {learners}": DENIED,
            f"SELECT count(*) {learners} AND query <> '<insufficient privilege>'": "nothing",
            "ALTER SYSTEM SET fsync = off": DENIED,
            "CREATE LANGUAGE plpython3u": "",
        },
    )


def test_actor_role_claims_for_ever_for_nobody_or_over_anothers_lease_refused(site):
    """It leases a ticket for ever, to nobody, or takes one whose lease runs | refused: a day at most, and by a name"""
    assert [t.id for t in site.actor.claim("honest", limit=1, lease_s=60)] == ["t0"]
    claim = "UPDATE tickets SET state = 'claimed', actor = 'me', lease_expires_s = {} WHERE id = 't1'"
    refused(
        site,
        {claim.format(lease): RULE for lease in ("'infinity'", "'NaN'", "NULL", "1e300", "now_s() + 90000")}
        | {"UPDATE tickets SET state = 'claimed', actor = NULL, lease_expires_s = 1 WHERE id = 't1'": RULE}
        | {"UPDATE tickets SET actor = 'me' WHERE id = 't0'": RULE},
    )


def test_actor_role_serves_as_a_fenced_actor_refused(site):
    """A fenced actor's claims and groups, by our calls or by SQL | FencedError; refused"""
    before = site.digest()
    with pytest.raises(FencedError, match="actor broken is fenced: it was"):
        site.actor.claim("broken", limit=1, lease_s=60)
    with pytest.raises(FencedError, match="broken is fenced"):
        site.actor.put_group(make_group(make_ticket("t1", order=1), actor="broken"))
    assert site.digest() == before
    refused(
        site, {"UPDATE tickets SET state = 'claimed', actor = 'broken', lease_expires_s = 1 WHERE id = 't1'": "fenced"}
    )


HUGE = "repeat('x', 70 * 1024 * 1024)"


def test_actor_role_stores_what_would_fill_the_learners_memory_refused(site):
    """It stores a payload over 64 MiB, a reason or name of megabytes, thousands of processes | a constraint refuses"""
    site.actor.claim("honest", limit=1, lease_s=60)
    refused(
        site,
        {
            f"INSERT INTO payloads VALUES ('{RUN}', 'c', convert_to({HUGE}, 'UTF8'))": "check constraint",
            f"INSERT INTO payloads VALUES ('{RUN}', repeat('x', 65), 'x')": "check constraint",
            f"UPDATE tickets SET state = 'failed', failure = {HUGE} WHERE id = 't0'": "check constraint",
            f"UPDATE tickets SET claim = {HUGE} WHERE id = 't0'": "check constraint",
            f"UPDATE tickets SET state = 'claimed', actor = {HUGE}, lease_expires_s = 1": "check constraint",
            f"INSERT INTO heartbeats VALUES ('{RUN}', 'x', convert_to({HUGE}, 'UTF8'), now_s())": "check constraint",
            f"INSERT INTO heartbeats VALUES ('{RUN}', repeat('x', 2000), 'x', now_s())": "",
            f"INSERT INTO heartbeats VALUES ('{RUN}', 'x', 'x', now_s() + 1e9)": RULE,
        },
    )
    with site.connect("postgres") as db:
        db.execute(
            f"INSERT INTO heartbeats SELECT '{RUN}', 'p' || i, 'x', now_s() FROM generate_series(1, 4097) i".encode()
        )
    refused(site, {f"INSERT INTO heartbeats VALUES ('{RUN}', 'one more', 'x', now_s())": "4096 processes per hour"})
    site.actor.heartbeat(Heartbeat(process="p1", role="actor", pid=1, time_s=0.0))  # who is there beats on


def test_actor_role_makes_an_anchor_smaller_refused(site):
    """It makes an anchor smaller, so that correct answers end as too slow, or forgets one | refused: they only go up"""
    site.actor.raise_anchors({"task": [1.5, 20.0]})
    refused(
        site,
        {
            "UPDATE anchors SET ms = '1500,19999'": RULE,
            "UPDATE anchors SET ms = '1500'": RULE,
            f"INSERT INTO anchors VALUES ('{RUN}', 'task', '0') ON CONFLICT (run, key) DO UPDATE SET ms = '0'": RULE,
            "DELETE FROM anchors": DENIED,
            "UPDATE anchors SET key = 'another'": DENIED,
            f"INSERT INTO anchors VALUES ('{OTHER}', 'task', '1')": POLICY,
            f"INSERT INTO anchors VALUES ('{RUN}', 'k', {HUGE})": "",
        },
    )
    site.actor.raise_anchors({"task": [0.1, 21.0]})
    assert site.actor.anchors(["task"]) == {"task": (1.5, 21.0)}


def test_actor_role_hands_in_a_group_outside_the_rules_refused(site):
    """It numbers groups itself, hands one in twice, or one that keeps the honest one out | refused"""
    insert = "INSERT INTO groups VALUES ('{run}', {seq}, '{id}', 'train', 'me', 0, 'mine')"
    with site.connect(ACTOR) as db:
        db.execute(f"INSERT INTO payloads VALUES ('{RUN}', 'mine', 'x')".encode())
    (seq,) = site.connect(ACTOR).execute("SELECT last_seq FROM runs").fetchone() or (0,)
    refused(
        site,
        {
            insert.format(run=RUN, seq=10**6, id="t1"): RULE,
            insert.format(run=RUN, seq=seq, id="t5"): RULE,
            insert.format(run=OTHER, seq=seq, id="t1"): RULE,
            f"UPDATE runs SET last_seq = last_seq + 1; {insert.format(run=RUN, seq=seq + 1, id='t1')}": RULE,
        },
    )
    assert site.actor.put_group(make_group(make_ticket("t1", order=1), actor="honest"))


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
