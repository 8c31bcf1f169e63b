"""A planner, three actors and a learner over one SQLite store, killed again and again."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from bridge.rollout_types import Ticket
from bridge.store.open import SqliteStore
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import kill, spawn, wait_until

pytestmark = pytest.mark.integration

NUM_TICKETS = 300
NUM_KILLS = 15
LEASE_S = 0.3


def ticket_of(order: int) -> Ticket:
    return make_ticket(f"t{order}", order=order, prompt_tokens=np.array([order, 1], np.int32))


def plan(store: SqliteStore, path: Path) -> None:
    """Offers every ticket, a few at a time; after a restart, from the beginning."""
    for start in range(0, NUM_TICKETS, 7):
        store.put_tickets(ticket_of(i) for i in range(start, min(start + 7, NUM_TICKETS)))


def act(store: SqliteStore, path: Path, actor: str) -> None:
    """Serves tickets until all are served; hands every group in twice."""
    while True:
        for ticket in store.claim(actor, limit=3, lease_s=LEASE_S):
            group = make_group(ticket, actor=actor, rollouts=(make_rollout(500, reward=float(ticket.order)),) * 2)
            store.put_group(group)
            assert store.put_group(group) is False
        counts = store.counts()
        if counts["done"] + counts["acknowledged"] == NUM_TICKETS:
            return


def learn(store: SqliteStore, path: Path) -> None:
    """Writes each group's id and seq to a ledger, then acknowledges; a restart skips what is in it."""
    ledger = os.open(path / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trained = {line.split()[0] for line in (path / "ledger").read_text().splitlines()}
    after_seq = 0
    while len(trained) < NUM_TICKETS:
        for stored in store.read_groups(after_seq=after_seq, limit=5):
            group = stored.group
            assert group.rollouts[1].reward == group.order == group.prompt_tokens[0]
            if group.ticket_id not in trained:
                # One write of a short line to a local file: there whole, or not at all.
                os.write(ledger, f"{group.ticket_id} {stored.seq}\n".encode())
                trained.add(group.ticket_id)
            after_seq = stored.seq
        store.acknowledge(sorted(trained))
    store.acknowledge(sorted(trained))


ROLES = {
    "planner": plan,
    "actor-0": lambda store, path: act(store, path, "actor-0"),
    "actor-1": lambda store, path: act(store, path, "actor-1"),
    "actor-2": lambda store, path: act(store, path, "actor-2"),
    "learner": learn,
}


def test_random_kills_lose_nothing_and_train_nothing_twice(tmp_path):
    def start(role: str):
        return spawn(__name__, role, tmp_path)

    def ledger() -> list[list[str]]:
        path = tmp_path / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    chance = random.Random(0)
    processes = {role: start(role) for role in ROLES}
    try:
        for kill_number in range(NUM_KILLS):
            # Spread over the whole run: each kill waits for its share of the work, plus a little chance.
            goal = kill_number * NUM_TICKETS // NUM_KILLS + chance.randrange(NUM_TICKETS // NUM_KILLS)
            wait_until(lambda goal=goal: len(ledger()) >= goal, f"{goal} groups trained")
            for role in chance.sample(sorted(ROLES), k=2):
                kill(processes[role])
                processes[role] = start(role)
        for role, process in processes.items():
            wait_until(lambda p=process: p.poll() is not None, f"{role} to end")
            assert process.returncode == 0, role
    finally:
        for process in processes.values():
            kill(process)

    rows = ledger()
    ids, seqs = [id_ for id_, _ in rows], [int(seq) for _, seq in rows]
    assert len(ids) == NUM_TICKETS
    assert set(ids) == {f"t{i}" for i in range(NUM_TICKETS)}
    assert seqs == sorted(seqs)  # every restart went on in the order of arrival
    store = SqliteStore(tmp_path / "store.db")
    want = {"open": 0, "claimed": 0, "done": 0, "acknowledged": NUM_TICKETS, "failed": 0, "reissued": 0}
    assert store.counts() == want
    store.close()


def test_many_processes_open_a_new_store_at_once(tmp_path):
    processes = [spawn(__name__, "open", tmp_path / "new") for _ in range(6)]
    for process in processes:
        assert process.wait(timeout=120) == 0
    store = SqliteStore(tmp_path / "new" / "store.db")
    assert store.acquire_leadership("here", lease_s=60) == 6
    store.close()


if __name__ == "__main__":
    role_, path_ = sys.argv[1], Path(sys.argv[2])
    store_ = SqliteStore(path_ / "store.db")
    if role_ == "open":
        store_.acquire_leadership("here", lease_s=60)
    else:
        ROLES[role_](store_, path_)
    store_.close()
