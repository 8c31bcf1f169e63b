"""What is trained next, by a list that is all there is of a queue."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import schema, sections
from learner.schedule.group_filter import TrainingOrder
from learner.schedule.round_planner import planner_of
from learner.schedule.ticket_ledger import training_sampling
from tests.learner.schedule.fakes import Problems


def world(train_start: Any, *, R=6, U=2):
    """The order over a planner of real rounds, and what waits: groups are no more than a place in submission order."""
    config = schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // U),
        rounds=sections.RoundsConfig(groups_per_round=R, groups_per_update=U, train_start=train_start),
    )
    planner = planner_of(config, training_sampling(config, ()), Problems(), incarnation=0)
    waiting: list[Any] = []

    def take(limit):
        taken, waiting[:] = waiting[:limit], waiting[limit:]
        return taken

    return planner, waiting, TrainingOrder(config, planner, take)


@given(seed=st.integers(0, 999))
def test_each_group_is_next_as_soon_as_it_is_there_and_an_update_is_never_overfilled(seed):
    planner, waiting, order = world("group_ready")
    rng, trained = random.Random(seed), []
    for _ in range(2):
        arriving = planner.issue(step=0)
        rng.shuffle(arriving)
        while arriving or waiting:
            for ticket in arriving[: rng.randint(0, 3)]:
                waiting.append(SimpleNamespace(order=ticket.order, ticket_id=ticket.id))
                arriving.remove(ticket)
            before, room = list(waiting), planner.num_left_in_update
            groups = order.next_groups()
            assert groups == before[:room]  # all that is there, in order of arrival, and no more than the update wants
            for group in groups:
                planner.consume(group.ticket_id)
            trained += [g.order for g in groups]
    assert sorted(trained) == list(range(12))


def test_groups_of_an_actor_that_is_fenced_during_a_take_are_out_of_a_round_that_is_not_complete():
    planner, waiting, order = world("round_complete")
    tickets = planner.issue(step=0)
    waiting.append(SimpleNamespace(order=0, ticket_id=tickets[0].id, actors={"bad"}))
    assert not order.next_groups()
    take = order._take
    order._take = lambda limit: (order.remove("bad"), take(limit))[1]
    waiting += [SimpleNamespace(order=t.order, ticket_id=t.id, actors={"good"}) for t in tickets]
    assert [g.actors for g in order.next_groups()] == [{"good"}] * 2


@pytest.mark.parametrize("seed", range(4))
def test_a_whole_round_waits_for_its_last_group_and_is_trained_in_submission_order(seed):
    planner, waiting, order = world("round_complete")
    tickets = planner.issue(step=0)
    random.Random(seed).shuffle(tickets)
    for ticket in tickets:
        assert order.next_groups() == []
        waiting.append(SimpleNamespace(order=ticket.order, ticket_id=ticket.id))
    updates = []
    for _ in range(3):
        groups = order.next_groups()
        updates.append([g.order for g in groups])
        for group in groups:
            planner.consume(group.ticket_id)
    assert updates == [[0, 1], [2, 3], [4, 5]]
    assert list(itertools.chain(*updates)) == list(range(6)) and order.next_groups() == []
