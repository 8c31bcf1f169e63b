"""Producers and a learner over one store, and somebody who kills them and its server again and again.

A group counts as trained when the learner's ledger names it: one short write to a local file, which stands for the
checkpoint. What is counted at the end is read from the ledger alone, not from the store.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from bridge.rollout_types import Ticket
from bridge.store.open import create_run, open_store
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import kill, spawn, wait_until
from tests.postgres import ACTOR

RUN, LEASE_S = "torture", 1.0
WINDOW = 120
"""Tickets that are out at once."""
NUM_TOKENS = 200
RETRY_S = 120.0
PRODUCERS = ("producer-0", "producer-1", "producer-2")
LEARNER = "learner"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a torture ended with."""

    issued: int
    trained: int
    """Different groups."""
    trained_twice: int
    lost: int
    server_kills: int
    client_kills: int
    seconds: float

    @property
    def groups_per_s(self) -> float:
        """Trained, all kills included."""
        return self.trained / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Urls:
    """How each side reaches the store."""

    learner: str
    actor: str


def torture(
    urls: Urls,
    folder: pathlib.Path,
    *,
    num_groups: int,
    client_kills: int,
    server_kills: int = 0,
    kill_server: Callable[[], None] | None = None,
    seed: int = 0,
) -> Outcome:
    """Runs until every group is trained, with kills of clients and server spread over the run; fails if one never is.

    The folder is for the ledger; `kill_server` kills the server and starts it again.
    """
    create_run(urls.learner, run=RUN, name="torture", actor_role=ACTOR)
    ledger, done = folder / "ledger", folder / "done"
    chance = random.Random(seed)
    goals = sorted(
        [(chance.randrange(num_groups), "server") for _ in range(server_kills)]
        + [(chance.randrange(num_groups), "client") for _ in range(client_kills)]
    )

    def start(role: str) -> subprocess.Popen[str]:
        return spawn(__name__, role, urls.learner if role == LEARNER else urls.actor, folder, num_groups)

    began_s = time.monotonic()
    processes = {role: start(role) for role in (LEARNER, *PRODUCERS)}
    try:
        for goal, victim in goals:
            wait_until(lambda goal=goal: _num_lines(ledger) >= goal, f"{goal} groups trained", deadline_s=300)
            if victim == "server" and kill_server is not None:
                kill_server()
            else:
                role = chance.choice([LEARNER, *PRODUCERS])
                kill(processes[role])
                processes[role] = start(role)
        wait_until(lambda: processes[LEARNER].poll() is not None, "the learner to end", deadline_s=300)
        done.touch()
        for role, process in processes.items():
            wait_until(lambda p=process: p.poll() is not None, f"{role} to end")
            assert process.returncode == 0, f"{role} ended with {process.returncode}"
    finally:
        for process in processes.values():
            kill(process)
    counts = collections.Counter(ledger.read_text().splitlines())
    return Outcome(
        issued=num_groups,
        trained=len(counts),
        trained_twice=sum(n > 1 for n in counts.values()),
        lost=len({f"t{i}" for i in range(num_groups)} - set(counts)),
        server_kills=server_kills,
        client_kills=client_kills,
        seconds=time.monotonic() - began_s,
    )


def _num_lines(ledger: pathlib.Path) -> int:
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def _ticket(order: int) -> Ticket:
    return make_ticket(f"t{order}", order=order, prompt_tokens=np.array([order, 1], np.int32))


def _produce(url: str, folder: pathlib.Path, name: str) -> None:
    """Serves tickets until the run is done; gives some back, and hands some groups in twice."""
    chance = random.Random(f"{name} {os.getpid()}")
    with contextlib.closing(open_store(url, run=RUN, retry_s=RETRY_S)) as store:
        while not (folder / "done").exists():
            mark = store.mark()
            tickets = store.claim(name, limit=4, lease_s=LEASE_S)
            for ticket in tickets:
                deed = chance.random()
                if deed < 0.02:
                    store.release(name, [ticket.id])
                    continue
                if deed < 0.04:
                    store.fail_ticket(ticket.id, "torture", max_attempts=10**6)
                    continue
                group = make_group(
                    ticket, actor=name, rollouts=(make_rollout(NUM_TOKENS, reward=float(ticket.order)),) * 2
                )
                store.put_group(group)
                if deed < 0.2:
                    assert store.put_group(group) is False
            if not tickets:
                store.wait(mark, ("tickets",), timeout_s=LEASE_S / 2)


def _learn(url: str, folder: pathlib.Path, num_groups: int) -> None:
    """Offers tickets, writes each group's id to the ledger, acknowledges; a restart skips what is in the ledger."""
    ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trained = set((folder / "ledger").read_text().splitlines())
    chance = random.Random(len(trained))
    with contextlib.closing(open_store(url, run=RUN, retry_s=RETRY_S)) as store:
        store.acquire_leadership(str(folder), lease_s=60.0)
        # What the run before may have trained and not acknowledged; and its tickets, some of which it may have lost.
        store.acknowledge(sorted(trained))
        num_issued, after_seq = 0, 0
        open_acks: list[str] = []
        while len(trained) < num_groups:
            mark = store.mark()
            if num_issued < min(num_groups, len(trained) + WINDOW):
                upto = min(num_groups, len(trained) + WINDOW)
                # Not those that are trained: the store has forgotten the oldest, and would offer them again.
                store.put_tickets([_ticket(i) for i in range(num_issued, upto) if f"t{i}" not in trained])
                num_issued = upto
            stored = store.read_groups(after_seq=after_seq, limit=16)
            for one in stored:
                group = one.group
                assert group.rollouts[1].reward == group.order == group.prompt_tokens[0]
                assert one.seq > after_seq
                after_seq = one.seq
                if group.ticket_id not in trained:
                    os.write(ledger, f"{group.ticket_id}\n".encode())  # there whole, or not at all
                    trained.add(group.ticket_id)
                open_acks.append(group.ticket_id)
            if len(open_acks) >= 8 or not stored:
                store.acknowledge(open_acks)
                open_acks = []
            if chance.random() < 0.05:
                store.renew_leadership(lease_s=60.0)
            if not stored:
                store.wait(mark, ("groups",), timeout_s=LEASE_S)
        store.acknowledge(sorted(trained))
        counts = store.counts()
        assert (counts["acknowledged"], counts["open"], counts["done"]) == (num_groups, 0, 0), counts


if __name__ == "__main__":
    _role, _url, _folder, _num = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
    if _role == LEARNER:
        _learn(_url, _folder, _num)
    else:
        _produce(_url, _folder, _role)
