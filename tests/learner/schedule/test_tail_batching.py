"""Over-provisioned rounds: the first R groups win, losers wait for a long round, no prompt is lost or favoured."""

import collections
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import schema, sections
from learner.schedule.round_planner import RoundPlanner
from learner.schedule.ticket_ledger import MAX_REPLACED_PER_GROUP, training_sampling
from tests.learner.schedule.fakes import Problems, Sourced


def config_of(R, *, eta_prompts=1.25, eta_samples=1.0, K=4):
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=1),
        rounds=sections.RoundsConfig(
            groups_per_round=R,
            groups_per_update=R,
            samples_per_group=K,
            overprovision_prompts=eta_prompts,
            overprovision_samples=eta_samples,
        ),
    )


def planner_of(config, problems=None):
    return RoundPlanner(config, training_sampling(config, ()), problems or Problems(), incarnation=0)


def prompt(ticket):
    return int(ticket.prompt_tokens[0])


def play_round(planner, rng, *, step=0):
    """One round: groups arrive in random order until it closes, then all are trained. Returns (trained, losers)."""
    issued = planner.issue(step=step)
    order = rng.sample(issued, len(issued))
    winners, losers = [], []
    while not losers and order:
        ticket = order.pop()
        winners.append(ticket)
        losers = planner.arrive(ticket.id)
    assert {t.id for t in losers} == {t.id for t in order}
    for ticket in winners:
        done = planner.consume(ticket.id)
    assert done.ends_round
    return winners, losers


ETAS = st.sampled_from([1.0, 1.1, 1.25, 1.5, 2.0, 3.0])


def max_rounds_deferred(rounds) -> int:
    """A bound on the rounds between the one a prompt loses and the long one it comes back in; 0 without a race.

    A short round adds n = eta_P R - R prompts, so a prompt is back after at most ceil(R / n) + 1 rounds, or twice that
    where R are before it.
    """
    num_losers = rounds.groups_issued - rounds.groups_per_round
    if num_losers == 0:
        return 0
    period = -(-rounds.groups_per_round // num_losers) + 1
    return period * -(-(rounds.groups_per_round + num_losers) // rounds.groups_per_round)


@given(R=st.integers(1, 9), eta=ETAS, seed=st.integers(0, 999))
def test_every_round_trains_r_groups_and_losers_come_back_in_long_rounds(R, eta, seed):
    planner, rng = planner_of(config_of(R, eta_prompts=eta, eta_samples=1.5)), random.Random(seed)
    waiting, trained = [], collections.Counter()
    for n in range(30):
        expected_long = len(waiting) >= R
        winners, losers = play_round(planner, rng, step=n)
        assert len(winners) == R and planner.round_is_long == expected_long
        # Long rounds race no samples.
        num_requests = 4 if expected_long else 6
        assert {(t.num_requests, t.round, t.min_version.step) for t in winners} == {(num_requests, n, n)}
        if expected_long:
            # The oldest R, and nobody else; none of them may lose.
            assert sorted(map(prompt, winners)) == sorted(waiting[:R]) and not losers
            waiting = waiting[R:]
        waiting += [prompt(t) for t in sorted(losers, key=lambda t: t.order)]
        assert [prompt(t) for t in planner.long_queue] == waiting
        trained.update(map(prompt, winners))
    drawn = planner._next_problem().prompt_tokens[0]
    # Each prompt that was drawn is trained once or waits once: none lost, none twice.
    assert trained + collections.Counter(waiting) == collections.Counter(range(drawn))


@given(R=st.integers(1, 9), eta=st.sampled_from([1.1, 1.25, 1.5, 2.0, 3.0]), seed=st.integers(0, 999))
def test_no_prompt_waits_longer_than_the_bound(R, eta, seed):
    config = config_of(R, eta_prompts=eta)
    planner, rng, bound = planner_of(config), random.Random(seed), max_rounds_deferred(config.rounds)
    lost_in: dict[int, int] = {}
    for n in range(60):
        winners, losers = play_round(planner, rng)
        for ticket in winners:
            if prompt(ticket) in lost_in:
                assert n - lost_in.pop(prompt(ticket)) <= bound
        lost_in |= {prompt(t): n for t in losers}
        assert all(n - since <= bound for since in lost_in.values())


def test_round_closes_at_the_rth_arrival_before_anything_is_trained():
    planner = planner_of(config_of(4, eta_prompts=1.5))
    tickets = planner.issue(step=0)
    assert len(tickets) == 6
    assert [planner.arrive(tickets[n].id) for n in (5, 0, 3)] == [[], [], []]
    assert [t.order for t in planner.arrive(tickets[1].id)] == [2, 4]
    assert len(planner.open_tickets) == 4 and not planner.is_open(tickets[2].id)
    with pytest.raises(KeyError):
        planner.arrive(tickets[2].id)
    assert planner.arrive(tickets[0].id) == []  # served again: the round is closed already


def test_state_between_rounds_gives_the_same_future():
    config, problems = config_of(4, eta_prompts=1.5), Problems()
    whole, rng = planner_of(config, problems), random.Random(7)
    for _ in range(3):
        play_round(whole, rng)
    again = Problems()
    again.next = problems.next
    resumed = planner_of(config, again)
    resumed.set_state(json.loads(json.dumps(whole.get_state())), whole.open_tickets, whole.long_queue)
    for seed in range(6):
        a, b = (play_round(p, random.Random(seed)) for p in (whole, resumed))
        assert [[t.id for t in x] for x in a] == [[t.id for t in x] for x in b]
        assert [prompt(t) for t in a[0]] == [prompt(t) for t in b[0]]


def test_source_of_a_prompt_that_lost_its_race_is_known_when_it_comes_back():
    config = config_of(4, eta_prompts=1.5)
    planner, rng = planner_of(config, Sourced()), random.Random(3)
    while not planner.round_is_long:
        play_round(planner, rng)
        waiting = planner.long_queue
        assert [planner.source(t.id) for t in waiting] == [f"s{prompt(t)}" for t in waiting]
        assert planner.get_state()["sources"].keys() == {t.id for t in waiting}  # nothing is open between rounds
        resumed = planner_of(config, Sourced())
        resumed.set_state(planner.get_state(), planner.open_tickets, waiting)
        if resumed.issue(step=0) and resumed.round_is_long:
            assert [resumed.source(t.id) for t in resumed.open_tickets] == [
                f"s{prompt(t)}" for t in resumed.open_tickets
            ]
            break
    else:
        raise AssertionError("no round was a long one")


def test_a_group_that_departs_does_not_count_towards_its_race():
    planner = planner_of(config_of(2, eta_prompts=2.0))
    tickets = planner.issue(step=0)
    planner.arrive(tickets[0].id)
    planner.forget_arrival(tickets[0].id)
    assert planner.arrive(tickets[1].id) == []
    assert [t.order for t in planner.arrive(tickets[0].id)] == [2, 3]


def test_renew_asks_for_newer_weights_but_for_those_kept():
    planner = planner_of(config_of(2, eta_prompts=1.0))
    a, b = planner.issue(step=0)
    (renewed,) = planner.reissue_open(step=5, keep=[a.id])
    assert (renewed.id, renewed.min_version.step) == (b.id, 5)
    assert [t.min_version.step for t in planner.open_tickets] == [0, 5]


def test_filter_throws_away_no_more_than_its_bound_in_any_round():
    # R groups, none with signal; the learner trains each as it is let through.
    planner = planner_of(config_of(4, eta_prompts=1.0))
    for _ in range(3):
        num_replaced = 0
        for ticket in planner.issue(step=0):
            while planner.may_replace:
                planner.replace(ticket.id, is_filtered=True)
                num_replaced += 1
            planner.arrive(ticket.id)
            planner.consume(ticket.id)
        assert num_replaced == MAX_REPLACED_PER_GROUP * 4


def test_failed_prompts_take_nothing_of_the_filters_bound_and_a_restart_keeps_what_is_spent():
    planner = planner_of(config_of(1, eta_prompts=1.0))
    (ticket,) = planner.issue(step=0)
    for _ in range(50):
        planner.replace(ticket.id)
    assert planner.may_replace
    for _ in range(10):
        planner.replace(ticket.id, is_filtered=True)
    restarted = planner_of(config_of(1, eta_prompts=1.0))
    restarted.set_state(planner.get_state(), planner.open_tickets)
    assert not restarted.may_replace
