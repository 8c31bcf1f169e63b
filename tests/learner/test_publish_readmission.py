"""A fenced actor's way back: over a real store, with logprobs that are off as the test says."""

import time
from typing import Any

import numpy as np
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Sampling, Task, Ticket, Version
from bridge.store.open import SqliteStore
from bridge.store.store_types import PERMANENT, FencedError
from learner.data.problem import Problem
from learner.parity import ALONE_S, LOOK_AT_BEATS_S, MAX_TRIES, ParityFence
from tests.bridge.factories import make_group, make_rollout

BOUND = 0.25
PROBLEMS = [(Problem(str(n), np.array([n + 1, 3], np.int32), Task.judged_by("exact", answer="")), 2) for n in range(2)]


class Setup:
    """The learner's side of a store; it is the gate, the publisher and the clock, too."""

    def __init__(self, store: SqliteStore, problems=PROBLEMS) -> None:
        self.store = store
        self.fenced_actors: set[str] = set()
        self.round = 3
        self.version: Version | None = Version(incarnation=1, step=4)
        self.off = 0.0
        self.now_s = 0.0
        self.unsound: set[str] = set()
        gate: Any = self
        self.readmission = ParityFence(
            store,
            gate,
            problems=problems,
            sampling=Sampling(max_tokens=8),
            published=lambda: self.version,
            score=lambda group: self.off,
            bound=BOUND,
            clock=lambda: self.now_s,
        )

    def fence(self, actor: str, reason: str, off_nats: float | None = None) -> None:
        self.store.fence(actor, reason)
        self.fenced_actors.add(actor)

    def suspect(self, actor: str) -> None:
        """Fences an actor that lives."""
        self.beat(actor)
        self.fence(actor, "off by 2")

    def unfence(self, actor: str) -> None:
        self.store.unfence(actor)
        self.fenced_actors.discard(actor)

    def is_sound(self, group: Group, ticket: Ticket) -> bool:
        return group.actor not in self.unsound

    def beat(self, *actors: str) -> None:
        for actor in actors:
            self.store.heartbeat(Heartbeat(process=actor, role="actor", pid=1, time_s=time.time()))

    def look(self) -> None:
        self.now_s += LOOK_AT_BEATS_S
        self.readmission.poll()

    def claim(self, actor: str) -> list[Ticket]:
        return [*self.store.claim(actor, limit=9, lease_s=100)]

    def answer(self, actor: str, *, step: int | None = None) -> None:
        """All that it may claim, by weights of a step."""
        for ticket in self.claim(actor):
            at = ticket.min_version.step if step is None else step
            self.put(ticket, actor, at)

    def probe(self, actor: str, *, step: int | None = None) -> None:
        """Asks and looks at the answer."""
        self.look()
        self.answer(actor, step=step)
        self.look()

    def put(self, ticket: Ticket, actor: str, step: int) -> None:
        rollouts = tuple(make_rollout(step=step) for _ in range(ticket.num_samples))
        self.store.put_group(
            make_group(ticket, actor=actor, incarnation=ticket.min_version.incarnation, rollouts=rollouts)
        )


@pytest.fixture
def s(store):
    return Setup(store)


def test_fenced_actor_that_answers_as_the_learner_would_is_let_in(s):
    s.suspect("bad")
    s.look()
    tickets = s.claim("bad")
    assert [t.kind for t in tickets] == ["probe"] * len(PROBLEMS)
    assert {t.min_version for t in tickets} == {s.version}
    s.store.release("bad", [t.id for t in tickets])
    s.off = BOUND
    s.answer("bad")
    s.look()
    assert s.fenced_actors == set() and s.store.fenced("bad") is None
    assert s.claim("bad") == []  # nothing of the probe is left
    assert s.store.read_groups(after_seq=0, limit=9, kind="probe") == []


def test_half_a_probe_lets_nobody_in(s):
    s.suspect("bad")
    s.look()
    first, second = s.claim("bad")
    s.store.release("bad", [second.id])
    s.put(first, "bad", 4)
    s.look()
    assert s.fenced_actors == {"bad"}
    s.answer("bad")
    s.look()
    assert s.fenced_actors == set()


@pytest.mark.parametrize("off", [BOUND * 1.01, float("nan")])
def test_actor_that_stays_off_is_asked_a_bounded_number_of_times_and_then_stays_out(s, off):
    s.suspect("bad")
    s.off = off
    reasons = []
    for _ in range(MAX_TRIES):
        s.look()
        assert len(s.claim("bad")) == len(PROBLEMS)
        s.store.release("bad", list(s.store.leased("bad")))
        s.answer("bad")
        s.look()
        reasons.append(s.store.fenced("bad"))
    assert len(set(reasons)) == MAX_TRIES  # by another reason an actor knows that it was off again
    assert [r.startswith(PERMANENT) for r in reasons] == [False] * (MAX_TRIES - 1) + [True]
    s.look()
    with pytest.raises(FencedError):
        s.claim("bad")


def test_answer_that_cannot_be_right_is_no_clean_one(s):
    s.suspect("bad")
    s.unsound.add("bad")
    s.probe("bad")
    assert s.fenced_actors == {"bad"}


def test_answer_by_other_weights_is_asked_for_again_and_no_try(s):
    s.suspect("bad")
    for _ in range(MAX_TRIES + 1):
        s.probe("bad", step=5)
    assert not (s.store.fenced("bad") or "").startswith(PERMANENT)
    s.probe("bad")
    assert s.fenced_actors == set()


def test_probe_whose_weights_the_learner_has_left_is_withdrawn_and_asked_with_the_next(s):
    s.beat("good")
    s.suspect("bad")
    s.look()
    s.version = None  # an update was made
    s.look()
    with pytest.raises(FencedError):
        s.claim("bad")
    s.version = Version(incarnation=1, step=5)
    s.look()
    assert {t.min_version.step for t in s.claim("bad")} == {5}


def test_actor_that_does_not_live_is_asked_nothing(s):
    s.fence("gone", "off by 2")
    s.look()
    with pytest.raises(FencedError):
        s.claim("gone")


def test_fence_without_problems_to_probe_with_is_for_good(store):
    s = Setup(store, problems=[])
    s.suspect("bad")
    s.look()
    assert (store.fenced("bad") or "").startswith(PERMANENT)


def test_fenced_actor_that_can_not_be_probed_ends_where_nobody_else_serves(s):
    s.suspect("bad")
    s.version = None
    s.look()
    s.now_s += ALONE_S
    s.look()
    assert (s.store.fenced("bad") or "").startswith(PERMANENT)


@pytest.mark.parametrize("before", ["no look", "nobody fenced", "another for good"])
def test_first_look_after_a_fence_ends_nobody_however_long_ago_the_last_was(s, before):
    s.version = None
    if before == "nobody fenced":
        s.look()
    if before == "another for good":
        s.beat("worse")
        s.readmission.ban("worse", "off by 9")
        s.look()
    s.now_s += 2 * ALONE_S
    s.suspect("bad")
    s.look()
    assert s.store.fenced("bad") == "off by 2"
    s.now_s += ALONE_S
    s.look()
    assert (s.store.fenced("bad") or "").startswith(PERMANENT)


def test_fenced_actor_waits_for_the_next_publish_where_others_serve(s):
    s.beat("good")
    s.suspect("bad")
    s.version = None
    for _ in range(3):
        s.now_s += ALONE_S
        s.beat("bad", "good")
        s.look()
    assert not (s.store.fenced("bad") or "").startswith(PERMANENT)


def test_nobody_fenced_costs_nothing(s):
    class Untouched:
        def __getattr__(self, name: str):
            raise AssertionError(name)

    untouched: Any = Untouched()
    s.readmission._store = untouched
    s.look()


def test_actor_fenced_for_good_is_probed_again_once_it_is_on_probation_and_alive(s):
    s.suspect("bad")
    s.off = 9.0
    for _ in range(MAX_TRIES):
        s.probe("bad")
    assert (s.store.fenced("bad") or "").startswith(PERMANENT)
    s.look()
    with pytest.raises(FencedError):
        s.claim("bad")
    # The operator's word, as `launch.tools.runs --unfence` writes it; its tries are counted anew.
    s.store.fence("bad", "on probation: off by 2")
    s.probe("bad")
    assert not (s.store.fenced("bad") or "").startswith(PERMANENT)
    s.off = 0.0
    s.probe("bad")
    assert s.fenced_actors == set() and s.store.fenced("bad") is None
