"""The fence's two halves together: an actor's loop, whose engine is made up, and the learner's readmission."""

import asyncio
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Group, Sampling, Task, Ticket, Version
from bridge.store.store_types import FencedError
from learner import parity
from learner.data.problem import Problem
from learner.parity import MAX_TRIES, ParityFence
from tests.actor.fakes import until
from tests.actor.loop_setup import Setup, ended, make_setup

pytestmark = pytest.mark.integration

PROBLEMS = [
    (Problem(str(n), np.array([n + 1, 3], np.int32), Task.judged_by("exact", answer="42")), 2) for n in range(2)
]
VERSION = Version(incarnation=0, step=0)


class Learner:
    """What the learner does while it waits; an engine is off until it has loaded its weights `num_bad_loads` times."""

    def __init__(self, s: Setup, *, num_bad_loads: int) -> None:
        self.s, self.num_bad_loads = s, num_bad_loads
        self.fenced_actors: set[str] = set()
        self.round = 0
        gate: Any = self
        self.readmission = ParityFence(
            s.store,
            gate,
            problems=PROBLEMS,
            sampling=Sampling(max_tokens=8),
            published=lambda: VERSION,
            score=self.score,
            bound=0.25,
        )

    def score(self, group: Group) -> float:
        return 3.0 if len(self.s.engine.swapped) <= self.num_bad_loads else 0.01

    def fence(self, actor: str, reason: str, off_nats: float | None = None) -> None:
        self.fenced_actors.add(actor)
        self.s.store.fence(actor, reason)

    def unfence(self, actor: str) -> None:
        self.fenced_actors.discard(actor)
        self.s.store.unfence(actor)

    def is_sound(self, group: Group, ticket: Ticket) -> bool:
        return True

    def has_let_in(self) -> bool:
        self.readmission.poll()
        return not self.fenced_actors


@pytest.fixture(autouse=True)
def beats_are_fresh(monkeypatch):
    monkeypatch.setattr(parity, "LOOK_AT_BEATS_S", 0.01)


@pytest.mark.parametrize("num_bad_loads", [1, 2])
async def test_actor_that_is_clean_after_it_started_over_serves_on(tmp_path, num_bad_loads):
    s = make_setup(tmp_path, auto=True)
    learner = Learner(s, num_bad_loads=num_bad_loads)
    s.publish(0)
    async with s.serving() as serving:
        await s.served(VERSION)
        learner.fence("actor-0", "its logprobs are off by 3 nats")
        await until(learner.has_let_in, "on probation")
        s.put(0)
        await until(lambda: len(s.groups()) == 1, "it serves")
        assert not serving.done() and len(s.engine.swapped) == 1 + num_bad_loads
    assert s.groups("probe") == []


async def test_actor_that_stays_off_ends(tmp_path):
    s = make_setup(tmp_path, auto=True)
    learner = Learner(s, num_bad_loads=1000)
    s.publish(0)
    async with s.serving() as serving:
        await s.served(VERSION)
        learner.fence("actor-0", "its logprobs are off by 3 nats")
        await until(lambda: learner.has_let_in() or serving.done(), "it ends")
        error = await ended(serving)
    assert isinstance(error, FencedError) and f"probe {MAX_TRIES} of {MAX_TRIES}" in str(error)
    await asyncio.sleep(0)
