"""Redundant prompts in a window: the first U of a heat win, losers come back in their own heats, bounds stay exact."""

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Ticket
from configs import schema, sections
from learner.schedule.ticket_ledger import training_sampling
from learner.schedule.window_planner import WindowPlanner
from tests.learner.schedule.fakes import Problems

ETAS = st.sampled_from([1.0, 1.1, 1.25, 1.5, 2.0, 3.0])
ALPHAS = st.sampled_from([None, 0.0, 0.5, 1.0, 1.5, 2.0])


def config_of(U, *, eta=1.25, eta_samples=1.0, alpha: float | None = None, R=None, K=2, **admission) -> schema.Config:
    return schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(
            groups_per_round=R or U,
            groups_per_update=U,
            samples_per_group=K,
            overprovision_prompts=eta,
            overprovision_samples=eta_samples,
        ),
        admission=sections.AdmissionConfig(policy="window", async_ratio=alpha, **admission),
        publish=sections.PublishConfig(when="every"),
    )


def window_of(config: schema.Config, problems: Problems | None = None) -> WindowPlanner:
    return WindowPlanner(config, training_sampling(config, ()), problems or Problems(), incarnation=0)


def prompt(ticket: Ticket) -> int:
    return int(ticket.prompt_tokens[0])


@dataclasses.dataclass
class ModelHeat:
    """What a heat is, written down apart: its orders, and who of them are here or gone."""

    is_long: bool
    orders: list[int]
    won: set[int] = dataclasses.field(default_factory=set)
    lost: set[int] = dataclasses.field(default_factory=set)


class Run:
    """A window, a learner that trains what is here, and a model of the heats beside it."""

    def __init__(self, config: schema.Config, seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        self.U = config.rounds.groups_per_update
        self.problems = Problems()
        self.window = window_of(config, self.problems)
        self.step = 0
        self.here: list[str] = []
        self.trained: list[int] = []
        """Prompts."""
        self.in_update: list[tuple[str, int]] = []
        self.heats: list[ModelHeat] = []
        self.long: list[int] = []
        """Prompts that wait."""

    def issue(self) -> None:
        backlog = math.ceil(self.config.rounds.overprovision_prompts * self.U - 1e-9)
        for ticket in self.window.issue(step=self.step, num_unclaimed=lambda: self.rng.randrange(backlog + 1)):
            newest = self.heats[-1] if self.heats else None
            size = 0 if newest is None else self.U if newest.is_long else backlog
            if newest is None or len(newest.orders) == size:
                newest = ModelHeat(is_long=len(self.long) >= self.U, orders=[])
                self.heats.append(newest)
            newest.orders.append(ticket.order)
            if newest.is_long:
                assert prompt(ticket) == self.long.pop(0), "the oldest first"
            assert ticket.num_requests == (
                self.config.rounds.samples_per_group if newest.is_long else self.config.rounds.requests_per_group
            )
            if (alpha := self.config.admission.async_ratio) is not None:
                index = len(self.heats) - 1
                assert index <= self.step + math.ceil(alpha if backlog == self.U else math.floor(alpha))
                assert ticket.min_version.step == max(0, min(index - math.ceil(alpha), self.step))

    def arrive(self) -> None:
        waiting = [t for t in self.window.open_tickets if t.id not in self.here]
        if not waiting:
            return
        ticket = self.rng.choice(waiting)
        heat = next(h for h in self.heats if ticket.order in h.orders)
        losers = self.window.arrive(ticket.id)
        self.here.append(ticket.id)
        heat.won.add(ticket.order)
        want = set()
        if len(heat.won) == self.U and not heat.is_long:
            want = set(heat.orders) - heat.won - heat.lost
        assert {t.order for t in losers} == want and not (heat.is_long and want)
        heat.lost |= want
        self.long += [prompt(t) for t in losers]

    def forget_arrival(self) -> None:
        """Dropped, and asked for anew; it is wanted on."""
        if self.here:
            id_ = self.here.pop(self.rng.randrange(len(self.here)))
            self.window.forget_arrival(id_)
            heat = next(h for h in self.heats if int(id_) in h.orders)
            if len(heat.won) < self.U:
                heat.won.remove(int(id_))

    def train(self) -> None:
        if not self.here:
            return
        ticket = self.window.ticket(self.here.pop(0))
        done = self.window.consume(ticket.id)
        self.trained.append(prompt(ticket))
        self.in_update.append((ticket.id, prompt(ticket)))
        if not done.ends_update:
            return
        if self.rng.random() < 0.2:  # as by the ESS stop
            assert {t.id for t in self.window.reopen_update()} == {i for i, _ in self.in_update}
            for id_, number in self.in_update:
                self.trained.remove(number)
                self.window.arrive(id_)
                self.here.append(id_)
        else:
            self.step += 1
        self.in_update = []

    def restart(self) -> None:
        """From a checkpoint of this very moment; what is here is read again."""
        if self.in_update:  # a checkpoint is of whole updates
            return
        again = Problems()
        again.next = self.problems.next
        restored = window_of(self.config, again)
        restored.set_state(
            json.loads(json.dumps(self.window.get_state())), self.window.open_tickets, self.window.long_queue
        )
        for heat in self.heats:  # a race that was not decided begins with nobody here
            if len(heat.won) < self.U:
                heat.won -= {int(i) for i in self.here}
        for id_ in self.here:
            heat = next(h for h in self.heats if int(id_) in h.orders)
            assert restored.arrive(id_) == [] or len(heat.won) + 1 == self.U
            heat.won.add(int(id_))
        self.window, self.problems = restored, again

    def check(self) -> None:
        state = self.window.get_state()
        num_open = len(self.window.open_tickets)
        assert state["num_consumed"] + num_open + state["num_deferred"] == state["num_issued"]
        assert self.window.num_issued == sum(len(h.orders) for h in self.heats)
        assert [prompt(t) for t in self.window.long_queue] == self.long
        # Each prompt that was drawn is trained once, open or waiting: none is lost, none is twice anywhere.
        everywhere = self.trained + self.long + [prompt(t) for t in self.window.open_tickets]
        assert sorted(everywhere) == list(range(self.problems.next))
        # At most U of a heat are ever trained, and what is wanted keeps to the async ratio.
        assert all(len(h.won) <= self.U for h in self.heats)
        if (alpha := self.config.admission.async_ratio) is not None:
            wanted = sum(min(self.U, len(h.orders)) for h in self.heats) - state["num_consumed"]
            assert wanted <= (1 + math.ceil(alpha)) * self.U


@given(U=st.integers(1, 5), eta=ETAS, alpha=ALPHAS, seed=st.integers(0, 10**6))
def test_heats_the_first_u_win_and_every_prompt_is_trained_open_or_waiting(U, eta, alpha, seed):
    run = Run(config_of(U, eta=eta, eta_samples=1.5, alpha=alpha), seed)
    acts = [run.issue, run.arrive, run.arrive, run.train, run.train, run.forget_arrival, run.restart]
    for _ in range(150):
        run.rng.choices(acts, weights=[4, 4, 4, 4, 4, 1, 1])[0]()
        run.check()


@pytest.mark.heavy
@given(U=st.integers(1, 5), eta=st.sampled_from([1.1, 1.5, 2.0, 3.0]), alpha=ALPHAS, seed=st.integers(0, 10**6))
def test_heats_no_prompt_starves_once_it_lost(U, eta, alpha, seed):
    """In heats begun since: short ones begin while fewer than U wait, so at most U of them are decided, others open.

    The long ones take U each of what waited before it.
    """
    run = Run(config_of(U, eta=eta, alpha=alpha), seed)
    since: dict[int, int] = {}
    num_losers, most_open = math.ceil(eta * U - 1e-9) - U, 0
    for _ in range(400):
        for act in (run.issue, run.arrive, run.train):
            act()
        for number in run.long:
            since.setdefault(number, len(run.heats))
        since = {number: first for number, first in since.items() if number in run.long}
        most_open = max(most_open, sum(len(h.won) < U for h in run.heats))
        bound = U + most_open + 2 + (U + num_losers * (most_open + 1)) // U
        assert all(len(run.heats) - first <= bound for first in since.values())
    assert run.step > 400 // U // 4  # and the learner is not held up


@pytest.mark.parametrize(("alpha", "issued"), [(0.0, 5), (0.5, 5), (1.0, 10), (2.0, 15)])
def test_heats_issued_ahead_are_those_of_the_async_ratio(alpha, issued):
    window = window_of(config_of(4, alpha=alpha))
    tickets = []
    while more := window.issue(step=0, num_unclaimed=lambda: 0):
        tickets += more
    assert len(tickets) == issued


def test_heat_that_races_is_issued_whole_however_little_the_backlog_lacks():
    window = window_of(config_of(4, eta=1.5))
    assert len(window.issue(step=0)) == 6
    assert window.issue(step=0, num_unclaimed=lambda: 6) == []
    assert [t.order for t in window.issue(step=0, num_unclaimed=lambda: 5)] == [6, 7, 8, 9, 10, 11]
    assert [t.order for t in window.issue_up_to(12, step=0)] == [12, 13, 14, 15, 16, 17]


def test_rounds_of_a_window_are_counted_by_its_winners():
    window = window_of(config_of(2, eta=2.0, alpha=1.0, R=4))
    for step in range(4):
        for ticket in window.issue(step=step):
            window.arrive(ticket.id) if window.is_open(ticket.id) else None
        here = [t for t in window.open_tickets][:2]
        assert {t.round for t in here} == {step // 2}
        for ticket in here:
            window.consume(ticket.id)


def test_state_whose_heats_do_not_add_up_is_refused():
    window = window_of(config_of(2, eta=1.5))
    tickets = window.issue(step=0)
    state = window.get_state()
    state["heats"]["heats"][0]["num_lost"] = 1
    with pytest.raises(ValueError, match="open tickets per race must be"):
        window_of(config_of(2, eta=1.5)).set_state(state, tickets)
