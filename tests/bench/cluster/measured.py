"""What a store really takes: groups a second from so many producers, beside so many actors that only look."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time

import numpy as np

from bridge.rollout_types import Ticket
from bridge.store.open import create_run, open_store
from tests.bridge.factories import make_ticket
from tests.integration.support.processes import kill, spawn
from tests.integration.support.store_torture import Urls
from tests.postgres import ACTOR, Server

RUN = "bench"
WINDOW, ACKNOWLEDGE_EVERY = 48, 8
LOOKERS_A_PROCESS = 10
_SETTLE_S = 3.0
"""Actors that look are there before the clock is read."""
_SILENCE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    engine: str
    num_samples: int
    num_tokens: int
    """Of a response."""
    num_producers: int
    num_lookers: int
    num_groups: int
    """Counted; a tenth as many pass before the clock is read."""
    claim_at_once: int = 1

    def ticket(self, order: int) -> Ticket:
        prompt = np.array([order, 1], np.int32)
        return make_ticket(f"t{order}", order=order, num_samples=self.num_samples, prompt_tokens=prompt)


def new_store(engine: str, folder: pathlib.Path, server: Server) -> Urls:
    """Makes a store of an engine."""
    if engine == "postgres":
        return Urls(**dict(zip(("learner", "actor"), server.create_store(), strict=True)))
    url = f"sqlite:///{tempfile.mkdtemp(dir=folder)}/store.db"
    return Urls(learner=url, actor=url)


def groups_per_s(urls: Urls, case: Case) -> float:
    """What a learner gets. Raises RuntimeError if nothing came for long."""
    create_run(urls.learner, run=RUN, name="bench", actor_role=ACTOR)
    sizes = (case.num_samples, case.num_tokens, case.claim_at_once)
    module = "tests.bench.cluster.actors"
    children = [
        spawn(module, "look", urls.actor, RUN, f"l{i}", min(LOOKERS_A_PROCESS, case.num_lookers - i))
        for i in range(0, case.num_lookers, LOOKERS_A_PROCESS)
    ]
    try:
        with contextlib.closing(open_store(urls.learner, run=RUN)) as store:
            store.acquire_leadership("bench", lease_s=600)
            while len(store.heartbeats()) < case.num_lookers:
                if any(child.poll() is not None for child in children):
                    raise RuntimeError("a process of actors has ended before all of them were there")
                time.sleep(0.1)
            children += [spawn(module, "produce", urls.actor, RUN, f"p{i}", *sizes) for i in range(case.num_producers)]
            time.sleep(_SETTLE_S if case.num_lookers else 0.0)
            return _learn(store, case)
    finally:
        for child in children:
            kill(child)


def _learn(store, case: Case) -> float:
    warm_up = max(1, case.num_groups // 10)
    num_issued = num_read = after_seq = 0
    began_s = heard_s = time.perf_counter()
    unacknowledged: list[str] = []
    while num_read < warm_up + case.num_groups:
        mark = store.mark()
        if num_issued < num_read + WINDOW // 2:
            store.put_tickets([case.ticket(i) for i in range(num_issued, num_read + WINDOW)])
            num_issued = num_read + WINDOW
        stored = store.read_groups(after_seq=after_seq, limit=ACKNOWLEDGE_EVERY)
        for one in stored:
            after_seq, heard_s = one.seq, time.perf_counter()
            num_read += 1
            unacknowledged.append(one.group.ticket_id)
            if num_read == warm_up:
                began_s = heard_s
        if len(unacknowledged) >= ACKNOWLEDGE_EVERY:
            store.acknowledge(unacknowledged)
            unacknowledged = []
        if not stored:
            if time.perf_counter() - heard_s > _SILENCE_S:
                raise RuntimeError(f"no group came for {_SILENCE_S} s: {case}")
            store.wait(mark, ("groups",), timeout_s=1.0)
    return (num_read - warm_up) / (time.perf_counter() - began_s)
