"""A database's runs, kept in order by a learner's role: listed, dropped whole, and nobody else's touched."""

import contextlib

import psycopg
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.admin import ON_PROBATION, open_runs
from bridge.store.open import FinishedRunError, PostgresStore, create_run, find_run
from bridge.store.store_types import PERMANENT, LearnerLivesError, StoreLostError, SupersededLearnerError
from tests.bridge.factories import make_announcement, make_group, make_run_card, make_ticket
from tests.bridge.store.engines import ACTOR, LEARNER

TABLES = (
    *("runs", "restores", "tickets", "groups", "payloads", "heartbeats", "fences", "announcements", "cards", "blobs"),
    *("dropped_objects", "serving", "anchors"),
)


@pytest.fixture
def url(place) -> str:
    return place.engine.url_of(LEARNER)


@pytest.fixture
def runs(url):
    with open_runs(url) as runs:
        yield runs


@pytest.fixture(autouse=True)
def others_stay(place, url):
    """A run beside it, of which nothing may go."""
    run = f"{place.run}-beside"
    create_run(url, run=run, name=run, actor_role=ACTOR)
    with contextlib.closing(PostgresStore(url, run=run)) as beside:
        fill(beside)
    before = rows(place, run)
    yield
    assert rows(place, run) == before and min(before.values()) > 0


def fill(store, bucket=None) -> None:
    """A row in every table."""
    tickets = [make_ticket(f"t{i}", order=i) for i in range(3)]
    store.acquire_leadership("here", lease_s=30)
    store.put_tickets(tickets)
    for ticket in tickets[:2]:
        store.put_group(make_group(ticket))
    store.acknowledge(["t0"])
    store.fence("bad", f"{PERMANENT}off by 2")
    store.announce(make_announcement(step=5))
    store.put_run_card(make_run_card(), {"af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262": b""})
    store.record_restore(0, 0)
    store.put_anchors({"task": [1.0, 2.5]})
    store.heartbeat(Heartbeat(process="learner", role="learner", pid=1, time_s=0.0))
    call = "INSERT INTO dropped_objects (run, ticket_id, object) VALUES (:run, 't', 'o') ON CONFLICT DO NOTHING"
    store._write(store._step(call))


def rows(place, run: str) -> dict[str, int]:
    def count(table: str) -> int:
        return place.engine.admin.execute(f"SELECT count(*) FROM sluice.{table} WHERE run = %s", (run,)).fetchone()[0]

    return {table: count(table) for table in TABLES}


def test_list_tells_what_there_is(place, learner, actor, runs):
    fill(learner)
    place.clock.now_s += 20
    actor.heartbeat(Heartbeat(process="far-1", role="actor", pid=1, time_s=0.0))
    place.clock.now_s += 4
    state = runs.find(place.run)
    assert (state.name, state.leader, state.finished_step, state.step) == ("a name", "here", None, 5)
    assert (state.num_trained, state.num_waiting, state.num_objects) == (1, 1, 0)
    assert state.silent_s == 4 and state.live_actors == ("far-1",)
    size = "SELECT sum(length(payload)) FROM sluice.{} WHERE run = %s"
    in_tables = [
        place.engine.admin.execute(size.format(t), (place.run,)).fetchone()[0] for t in ("payloads", "tickets")
    ]
    assert state.num_bytes == sum(in_tables) + len("1000,2500")
    learner.finish(9)
    place.clock.now_s += 100
    state = runs.find(place.run)
    assert (state.leader, state.finished_step, state.live_actors) == ("", 9, ())


def test_drop_leaves_no_row_of_the_run(place, learner, runs):
    fill(learner)
    learner.release_leadership()
    assert min(rows(place, place.run).values()) > 0
    assert runs.drop(place.run).run == place.run
    assert set(rows(place, place.run).values()) == {0}
    with pytest.raises(ValueError, match="has no run"):
        runs.find(place.run)


def test_drop_of_a_run_that_is_led_or_served_is_refused_unless_forced_and_then_its_processes_hear(
    place, learner, actor, runs
):
    fill(learner)
    before = rows(place, place.run)
    with pytest.raises(ValueError, match="has a learner, at here: stop it, or set --force"):
        runs.drop(place.run)
    learner.release_leadership()
    actor.heartbeat(Heartbeat(process="far-1", role="actor", pid=1, time_s=0.0))
    with pytest.raises(ValueError, match="is served by far-1"):
        runs.drop(place.run)
    assert rows(place, place.run) == before | {"heartbeats": 2} and actor.finished() is None
    learner.acquire_leadership("here", lease_s=30)
    runs._take_away(place.run, force=True)  # as far as a drop goes that is cut off
    assert actor.finished() is not None
    with pytest.raises(SupersededLearnerError):
        learner.renew_leadership(lease_s=30)
    with pytest.raises(FinishedRunError):
        find_run(place.engine.url_of(ACTOR), place.run)
    runs.drop(place.run, force=True)
    assert set(rows(place, place.run).values()) == {0}


def test_run_whose_drop_was_cut_off_is_led_by_nobody_until_it_is_dropped_to_its_end(
    place, learner, runs, url, monkeypatch
):
    fill(learner)
    learner.release_leadership()
    write = runs._write

    def cut_off(run, *steps, **options):
        if any("DELETE FROM tickets" in step.sql for step in steps):
            raise StoreLostError("cut off")
        return write(run, *steps, **options)

    with monkeypatch.context() as patch, pytest.raises(StoreLostError):
        patch.setattr(runs, "_write", cut_off)
        runs.drop(place.run)
    assert rows(place, place.run)["groups"] == 0 < rows(place, place.run)["tickets"]
    place.clock.now_s += 30 * 86400
    assert runs.find(place.run).leader == "whoever drops it"
    with (
        contextlib.closing(PostgresStore(url, run=place.run)) as another,
        pytest.raises(LearnerLivesError, match="partly deleted: finish its deletion"),
    ):
        another.acquire_leadership("here", lease_s=30)
    runs.drop(place.run)
    assert set(rows(place, place.run).values()) == {0}


def test_drop_with_its_bucket_deletes_the_objects_of_this_run_alone(place, runs, tmp_path):
    bucket = tmp_path / "bucket"
    files = [bucket / "groups" / run / "object" for run in (place.run, f"{place.run}0")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    runs.drop(place.run, bucket=f"file://{bucket}")
    assert [file.exists() for file in files] == [False, True]


def test_name_of_several_runs_is_told_apart_by_their_ids(place, url, runs):
    for run in ("one", "two"):
        create_run(url, run=f"{place.run}-{run}", name=f"{place.run}-name", actor_role=ACTOR)
    with pytest.raises(ValueError, match=f"2 runs have the name '{place.run}-name'; use an id: .*not finished"):
        runs.drop(f"{place.run}-name")


def test_actor_that_is_fenced_for_good_is_put_on_probation(place, learner, runs):
    fill(learner)
    with pytest.raises(ValueError, match="actor 'good' of run .* is not fenced; fenced actors: bad"):
        runs.put_on_probation(place.run, "good")
    for _ in range(2):
        runs.put_on_probation(place.run, "bad")
        assert learner.fenced("bad") == f"{ON_PROBATION}off by 2" and learner.fenced_actors() == {"bad"}


def test_actors_role_is_refused_by_us_and_by_the_tables(place, learner, monkeypatch):
    fill(learner)
    url = place.engine.url_of(ACTOR)
    with pytest.raises(ValueError, match=f"role {ACTOR} may not manage runs"), open_runs(url):
        pass
    monkeypatch.setattr("bridge.store.postgres.tables_and_roles.check_learner", lambda db: None)
    before = rows(place, place.run)
    with open_runs(url) as runs:
        for act in (runs.all, lambda: runs._take_away(place.run, force=True)):
            with pytest.raises(PermissionError, match="permission denied"):
                act()
    with psycopg.connect(f"{url}?options=-csearch_path%3Dsluice", autocommit=True) as db:
        for table in (t for t in TABLES if t not in ("payloads",)):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(f"DELETE FROM {table} WHERE run = '{place.run}'".encode())
        assert db.execute("DELETE FROM payloads RETURNING run").fetchall() == []
    assert rows(place, place.run) == before


def test_other_learners_runs_are_neither_seen_nor_dropped(place, learner, postgres):
    fill(learner)
    postgres.create_role("keeper")
    place.engine.admin.execute("GRANT sluice_learner TO keeper")
    with open_runs(place.engine.url_of("keeper")) as runs:
        assert runs.all() == []
        with pytest.raises(ValueError, match="has no run"):
            runs.drop(place.run, force=True)
