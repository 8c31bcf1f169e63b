"""Order of training under a lag bound: against a search through all orders of arrival, and in a real window."""

import dataclasses
import functools
import itertools
import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Version
from configs import schema, sections
from learner.schedule.group_filter import GroupFilter
from learner.schedule.round_planner import planner_of
from learner.schedule.served_steps import LOOK_S, ServedSteps
from learner.schedule.ticket_ledger import num_sequences, training_sampling
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Beats, Problems


def fits(deadlines: list[int], *, update: int, left: int, per_update: int) -> bool:
    """Whether groups can all be trained in time: the oracle, which fills updates one after the other."""
    places = itertools.chain([update] * left, *([u] * per_update for u in range(update + 1, update + 20)))
    return all(at <= max(deadline, update) for deadline, at in zip(sorted(deadlines), places, strict=False))


@given(
    coming=st.lists(st.integers(0, 6), max_size=7),
    deadline=st.integers(0, 8),
    left=st.integers(1, 3),
    per_update=st.integers(1, 3),
)
def test_as_many_overtake_as_leave_all_that_is_coming_its_place_in_time(coming, deadline, left, per_update):
    earlier = [d for d in coming if d < deadline]
    if left > per_update or not fits(earlier, update=0, left=left, per_update=per_update):
        return  # not a state of a window that kept the rule so far
    counts = {d: coming.count(d) for d in coming}
    found = num_sequences(deadline, counts, update=0, left=left, per_update=per_update)
    for taken in range(1, left + 1):
        goes = fits(earlier, update=0, left=left - taken, per_update=per_update)
        assert (taken <= found) == goes


def window(*, U=2, K=2, sequences=0, **fields: Any) -> schema.Config:
    admission = dict(policy="window", sequences=sequences) | fields.pop("admission", {})
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=4),
        rounds=sections.RoundsConfig(groups_per_round=U, groups_per_update=U, samples_per_group=K, **fields),
        admission=sections.AdmissionConfig(**admission),
        publish=sections.PublishConfig(when="every"),
    )


def has_signal(group: Group) -> bool:
    return group.rollouts[0].reward != group.rollouts[1].reward


class Run:
    """A window's books and arrivals, without a store."""

    def __init__(self, config: schema.Config) -> None:
        self.planner = planner_of(config, training_sampling(config, ()), Problems(), incarnation=0)
        self.ticket_store = mock.Mock(spec_set=["put_tickets", "acknowledge", "withdraw", "reissue"])
        self.group_filter = GroupFilter(
            config, planner=self.planner, ticket_store=self.ticket_store, has_signal=has_signal
        )
        self.issue()

    def issue(self) -> list[int]:
        tickets = self.planner.issue(step=self.group_filter.step)
        return [t.order for t in tickets]

    def arrive(self, *orders: int, step: int, reward: float = 1.0) -> None:
        for order in orders:
            ticket = self.planner.ticket(f"{order:09d}")
            rollouts = make_rollout(step=step, reward=0.0), make_rollout(step=step, reward=reward)
            self.group_filter.receive(make_group(ticket, rollouts=rollouts))

    def train(self) -> list[int]:
        groups = self.group_filter.take(self.planner.num_left_in_update)
        done = [self.planner.consume(g.ticket_id) for g in groups]
        if done and done[-1].ends_update:
            self.group_filter.step += 1
        return [g.order for g in groups]


@pytest.mark.parametrize("lag", [dict(admission=dict(async_ratio=2.0)), dict(max_lag_steps=2), {}])
def test_what_waits_is_trained_from_the_oldest_weights_on_under_a_bound_and_by_arrival_without(lag):
    run = Run(window(U=4, sequences=0 if "admission" in lag else 32, **lag))
    run.group_filter.step = 2
    run.arrive(0, step=2)
    run.arrive(1, step=0)
    run.arrive(2, 3, step=1)
    assert run.train() == ([1, 2, 3, 0] if lag else [0, 1, 2, 3])


def test_prompt_that_takes_another_ones_place_may_be_trained_as_late_as_its_weights_allow():
    """A filter would have every update wait for groups that only just began."""
    run = Run(window(admission=dict(async_ratio=1.0), filter_zero_variance=True))
    run.issue()
    run.arrive(0, 1, step=0)
    run.train()
    run.planner.served_step = 1
    run.issue()
    run.arrive(2, step=0, reward=0.0)  # of update 1: no signal
    assert run.planner.ticket("000000002").min_version == Version(incarnation=0, step=1)
    run.arrive(3, step=0)
    run.arrive(4, step=1)
    assert run.train() == [3, 4]
    run.arrive(2, 5, step=1)
    assert run.train() == [2, 5] and run.group_filter.dropped == {"zero_variance": 1}


@pytest.mark.parametrize("lag", [dict(max_lag_steps=2), dict(admission=dict(async_ratio=2.0))])
def test_group_that_gives_way_keeps_no_other_waiting_once_every_engine_has_newer_weights(lag):
    admission = lag.pop("admission", dict(sequences=8)) | dict(when_full="drop_oldest", queue_groups=1)
    run = Run(window(admission=admission, **lag))
    run.issue()
    run.group_filter.step = run.planner.served_step = 2
    run.arrive(0, 1, 2, 3, step=2)
    run.group_filter.drop_oldest()
    assert run.group_filter.dropped == {"overflow": 3} and not run.ticket_store.reissue.called
    assert [t.min_version.step for t in run.planner.open_tickets] == [2, 2, 2, 0]
    assert run.train() == [3]


def test_ticket_asks_for_no_older_weights_than_every_engine_serves():
    run = Run(window(max_lag_steps=8, sequences=8))
    run.group_filter.step, run.planner.served_step = 7, 5
    run.planner.issue_up_to(20, step=7)
    assert {t.min_version.step for t in run.planner.open_tickets if t.order > 12} == {5}
    run.planner.served_step = 9  # never newer ones than are published
    run.planner.issue_up_to(24, step=7)
    assert run.planner.ticket("000000024").min_version.step == 7


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "lag",
    [
        dict(admission=dict(async_ratio=1.0)),
        dict(admission=dict(async_ratio=2.0), overprovision_prompts=1.5),
        dict(max_lag_steps=3, sequences=12),
        dict(admission=dict(async_ratio=0.5), filter_zero_variance=True),
    ],
)
def test_any_order_of_arrival_ends_each_update_and_nothing_goes_stale(lag, seed):
    rng, run = random.Random(seed), Run(window(**lag))
    running: dict[int, int] = {}
    trained: list[int] = []
    while run.group_filter.step < 12:
        run.issue()
        for ticket in run.planner.open_tickets:
            waits = any(g.ticket_id == ticket.id for g in run.group_filter._ready)
            if ticket.order not in running and not waits:
                running[ticket.order] = rng.randint(ticket.min_version.step, run.group_filter.step)
        order = max(running) if rng.random() < 0.7 else rng.choice(list(running))  # the oldest are the slowest
        began = running.pop(order)
        if run.planner.is_open(f"{order:09d}"):
            run.arrive(order, step=began, reward=float(rng.random() < 0.8))
        trained += run.train()
    assert len(trained) == len(set(trained))
    assert not run.ticket_store.reissue.called and set(run.group_filter.dropped) <= {"zero_variance"}


def beat(process: str, version: Version | None, *, time_s: float = 999.0, role: Any = "actor") -> Heartbeat:
    return Heartbeat(process=process, role=role, pid=1, time_s=time_s, version=version)


def test_served_step_is_the_oldest_of_live_engines_that_serve_this_learners_weights():
    store: Any = Beats()
    now = [0.0]
    served = ServedSteps(store, incarnation=1, is_needed=True, clock=lambda: now[0])
    assert served.step == 0
    at = functools.partial(Version, incarnation=1)
    store.beats = [
        beat("a", at(step=7)),
        beat("b", at(step=5)),
        beat("gone", at(step=1), time_s=980.0),
        beat("before", Version(incarnation=0, step=2)),  # takes this learner's weights before it begins anything
        beat("starts", None),
        beat("learner", None, role="learner"),
    ]
    assert (served.step, store.num_reads) == (0, 1)  # not looked at again so soon
    now[0] += LOOK_S
    assert (served.step, served.step, store.num_reads) == (5, 5, 2)
    store.beats = [dataclasses.replace(b, time_s=10.0) for b in store.beats]
    now[0] += LOOK_S
    assert served.step == 0
    assert ServedSteps(store, incarnation=1, is_needed=False).step == 0 and store.num_reads == 3
