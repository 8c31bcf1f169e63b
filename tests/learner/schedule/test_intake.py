"""Arrivals in a real store: races end, prompts without signal are replaced, nothing is trained under another's id."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from bridge.store.sqlite import SqliteStore
from configs import schema, sections
from learner.schedule.stream import Stream
from learner.schedule.ticket_books import MAX_REPLACED_PER_GROUP, training_sampling
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Marks, Problems

K = 2
NO_PENALTY = sections.LossConfig()


class Desk:
    def __init__(self, store, *, R=2, loss=NO_PENALTY, **rounds):
        self.config = schema.Config(
            preset="test",
            run=sections.RunConfig(num_updates=1),
            rounds=sections.RoundsConfig(groups_per_round=R, groups_per_update=R, samples_per_group=K, **rounds),
            loss=loss,
        )
        self.store = store
        timeline: Any = Marks()
        stream = Stream(
            self.config,
            store=store,
            prompts=Problems(),
            sampling=training_sampling(self.config, ()),
            timeline=timeline,
            incarnation=0,
        )
        self.planner, self.intake = stream.planner, stream.intake
        self.store.put_tickets(self.planner.issue(step=0))

    def arrive(self, order, rewards=(0.0, 1.0), **fields):
        ticket = self.planner.ticket(f"{order:09d}")
        group = make_group(ticket, rollouts=tuple(make_rollout(reward=r) for r in rewards))
        before = self.intake.dropped.copy()
        self.intake.take_in(dataclasses.replace(group, **fields))
        (*reasons,) = self.intake.dropped - before
        return reasons[0] if reasons else None

    def offered(self):
        """(order, prompt) of what actors may claim."""
        claimed = self.store.claim("a", limit=99, lease_s=60)
        self.store.release("a", [t.id for t in claimed])
        return [(t.order, int(t.prompt_tokens[0])) for t in claimed]


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as opened:
        yield opened


def test_the_rth_arrival_withdraws_the_losers(store):
    desk = Desk(store, R=2, overprovision_prompts=2.0)
    assert [o for o, _ in desk.offered()] == [0, 1, 2, 3]
    assert desk.arrive(3) is None
    assert len(desk.offered()) == 4
    assert desk.arrive(1) is None
    assert [o for o, _ in desk.offered()] == [1, 3]
    assert [t.order for t in desk.planner.long_queue] == [0, 2]


def test_group_without_signal_makes_way_for_another_prompt_of_its_round(store):
    desk = Desk(store, filter_zero_variance=True)
    assert desk.arrive(0, rewards=(1.0, 1.0)) == "zero_variance"
    assert desk.offered() == [(0, 2), (1, 1)]  # the third problem has the first one's place
    assert desk.arrive(0) is None and len(desk.planner.open_tickets) == 2


def test_group_without_signal_is_kept_where_nothing_filters(store):
    assert Desk(store).arrive(0, rewards=(1.0, 1.0)) is None


def test_signal_is_looked_for_after_the_overlong_penalty(store):
    desk = Desk(store, filter_zero_variance=True, loss=sections.LossConfig(overlong_buffer_tokens=8))
    lengths = (3, 14)  # of at most 16, the last 8 punished
    assert desk.arrive(0, rollouts=tuple(make_rollout(n, reward=1.0) for n in lengths)) is None


def test_a_round_of_prompts_without_signal_ends_all_the_same(store):
    desk = Desk(store, R=1, filter_zero_variance=True)
    reasons = [desk.arrive(0, rewards=(0.0, 0.0)) for _ in range(MAX_REPLACED_PER_GROUP + 1)]
    assert reasons == ["zero_variance"] * MAX_REPLACED_PER_GROUP + [None]


def test_group_of_another_prompt_than_its_ticket_has_is_kept_out_and_the_right_one_offered(store):
    desk = Desk(store)
    stranger = np.array([77], np.int32)
    store.withdraw(["000000000"])
    store.put_tickets([dataclasses.replace(desk.planner.ticket("000000000"), prompt_tokens=stranger)])
    assert desk.arrive(0, prompt_tokens=stranger) == "other_prompt"
    assert desk.offered() == [(0, 0), (1, 1)]
