"""Plans that PostgreSQL makes while the tables are empty, and keeps: they serve tables that have grown, too."""

import contextlib

import pytest

from bridge.store.open import PostgresStore, create_run
from tests.bridge.factories import make_group, make_ticket
from tests.bridge.store.engines import rows
from tests.postgres import ACTOR

NUM_TICKETS = 120


@pytest.fixture
def sides(postgres):
    """A learner's and an actor's store in a database that nobody has used or analysed."""
    learner_url, actor_url = postgres.create_store()
    create_run(learner_url, run="r", name="n", actor_role=ACTOR)
    with (
        contextlib.closing(PostgresStore(learner_url, run="r")) as learner,
        contextlib.closing(PostgresStore(actor_url, run="r")) as actor,
    ):
        yield learner, actor


def num_rows_read(*stores) -> int:
    """Rows of tickets, groups, payloads and anchors that were fetched so far, by the server's count."""
    for store in stores:
        rows(store, "SELECT pg_stat_force_next_flush() WHERE :run <> ''")
    counted = """SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables
        WHERE :run <> '' AND relname IN ('tickets', 'groups', 'payloads', 'anchors')"""
    return int(rows(stores[0], counted)[0][0])


@pytest.mark.heavy
def test_plans_of_empty_tables_read_few_rows_when_many_tickets_are_there(sides):
    learner, actor = sides
    orders = iter(range(10 * NUM_TICKETS))
    after_seq = 0

    def serve(num_tickets: int, *, acknowledges: bool = True) -> None:
        nonlocal after_seq
        tickets = [make_ticket(f"t{i}", order=i) for i in (next(orders) for _ in range(num_tickets))]
        learner.put_tickets(tickets)
        while claimed := actor.claim("x", limit=num_tickets, lease_s=60, width=num_tickets, among=2):
            assert all(actor.put_group(make_group(ticket, actor="x")) for ticket in claimed)
        stored = learner.read_groups(after_seq=after_seq, limit=num_tickets)
        after_seq = stored[-1].seq if stored else after_seq
        if acknowledges:
            learner.acknowledge([one.group.ticket_id for one in stored])

    for _ in range(12):  # psycopg prepares a statement at its fifth use, and the server keeps a plan after five more
        serve(1)
    serve(NUM_TICKETS)
    serve(NUM_TICKETS, acknowledges=False)

    before = num_rows_read(learner, actor)
    serve(1)
    assert num_rows_read(learner, actor) - before < NUM_TICKETS // 2


def test_page_of_anchors_reads_its_own_rows_in_a_table_that_nobody_analysed(sides):
    learner, _ = sides
    for start in range(0, 4000, 500):
        learner.put_anchors({f"k{i:05}": [1.0] * 20 for i in range(start, start + 500)})
    for page in range(12):  # by the plans of the first uses, and by the one that is kept
        before = num_rows_read(learner)
        assert len(learner.all_anchors(after=f"k{100 * page:05}", limit=10)) == 10
        assert num_rows_read(learner) - before <= 20
