import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Version
from configs import schema, sections
from learner.schedule.round_planner import planner_of
from learner.schedule.ticket_ledger import Consumed, training_sampling
from tests.bridge.factories import as_plain
from tests.learner.schedule.fakes import Problems, Sourced


def config_of(R, U, *, width=0, K=2):
    """By rounds; with a width by window."""
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=R // U),
        rounds=sections.RoundsConfig(groups_per_round=R, groups_per_update=U, samples_per_group=K),
        admission=sections.AdmissionConfig(policy="window" if width else "fifo", width=width or "auto"),
        publish=sections.PublishConfig(when="every" if width else "round_end"),
    )


def books_of(config, *, incarnation=0, problems=None):
    return planner_of(config, training_sampling(config, (9,)), problems or Problems(), incarnation=incarnation)


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda x: (x[0] * x[1], x[1]))  # (R, U), U divides R
CHOICES = st.lists(st.integers(0, 10**6), max_size=60)


def consume_some(planner, choices, *, step=0):
    """Issues before every group, as the learner does; consumes an open ticket picked by each choice."""
    trace = []
    for choice in choices:
        issued = planner.issue(step=step)
        tickets = planner.open_tickets
        ticket = tickets[choice % len(tickets)]
        trace.append(([as_plain(t) for t in issued], ticket.id, planner.consume(ticket.id)))
    return trace


@given(sizes=SIZES, choices=CHOICES)
def test_issue_by_rounds_gives_whole_rounds_and_only_between_them(sizes, choices):
    R, U = sizes
    planner = books_of(config_of(R, U))
    orders = itertools.count()
    for n, choice in enumerate(choices):
        issued = planner.issue(step=0)
        assert len(issued) == (R if n % R == 0 else 0)
        for ticket in issued:
            order = next(orders)
            assert (ticket.order, ticket.round, ticket.num_samples) == (order, order // R, 2)
            assert list(ticket.prompt_tokens) == [order]
        assert planner.issue(step=0) == []
        tickets = planner.open_tickets
        done = planner.consume(tickets[choice % len(tickets)].id)
        assert done == Consumed(ends_update=(n + 1) % U == 0, ends_round=(n + 1) % R == 0)
        assert planner.num_left_in_update == U - (n + 1) % U
        assert planner.round == (n + 1) // R


@given(sizes=SIZES, width=st.integers(0, 6), before=CHOICES, after=CHOICES)
def test_set_state_midway_gives_the_same_future(sizes, width, before, after):
    R, U = sizes
    config = config_of(R, U, width=width and width + U)
    problems = Problems()
    whole = books_of(config, problems=problems)
    consume_some(whole, before)

    resumed_problems = Problems()
    resumed_problems.next = problems.next
    resumed = books_of(config, problems=resumed_problems)
    resumed.set_state(json.loads(json.dumps(whole.get_state())), whole.open_tickets)

    assert consume_some(resumed, after) == consume_some(whole, after)


def test_set_state_books_that_do_not_add_up_are_refused():
    planner = books_of(config_of(4, 2))
    tickets = planner.issue(step=0)
    state = planner.get_state()
    with pytest.raises(ValueError, match="the 4 issued, got 0 \\+ 0 \\+ 3"):
        books_of(config_of(4, 2)).set_state(state, tickets[:3])


def test_issue_ticket_ids_do_not_depend_on_incarnation_or_step():
    first = books_of(config_of(4, 2), incarnation=0).issue(step=0)
    again = books_of(config_of(4, 2), incarnation=3).issue(step=7)
    assert [t.id for t in first] == [t.id for t in again] and len({t.id for t in first}) == 4
    # What a ticket asks of the weights does: none older than the ones now published.
    assert {t.min_version for t in again} == {Version(incarnation=3, step=7)}


def test_issue_up_to_by_rounds_issues_the_next_round_once_the_last_is_trained():
    planner = books_of(config_of(4, 2))
    tickets = planner.issue(step=0)
    assert planner.issue_up_to(3, step=0) == []
    assert planner.issue_up_to(5, step=0) == []  # of a round that can't have begun
    for ticket in tickets:
        planner.consume(ticket.id)
    assert [t.order for t in planner.issue_up_to(5, step=2)] == [4, 5, 6, 7]
    assert planner.issue(step=2) == []


def test_issue_up_to_by_window_issues_what_is_missing_and_no_more():
    planner = books_of(config_of(4, 2, width=3))
    planner.issue(step=0)
    assert planner.issue_up_to(1, step=0) == []
    assert [t.order for t in planner.issue_up_to(4, step=2)] == [2, 3, 4]
    assert planner.issue(step=2, num_unclaimed=lambda: 5) == []  # the backlog is full, and more


def test_issue_up_to_gives_the_tickets_that_issue_would_have():
    a, b = books_of(config_of(4, 2)), books_of(config_of(4, 2))
    assert [as_plain(t) for t in a.issue_up_to(3, step=5)] == [as_plain(t) for t in b.issue(step=5)]


def test_consume_twice_or_unknown_is_refused():
    planner = books_of(config_of(4, 2))
    (ticket, *_) = planner.issue(step=0)
    planner.consume(ticket.id)
    for id_ in (ticket.id, "nosuch"):
        with pytest.raises(KeyError):
            planner.consume(id_)
    assert (planner.get_state()["num_issued"], planner.get_state()["num_consumed"]) == (4, 1)


def test_training_sampling_is_the_configs():
    sampling = training_sampling(config_of(4, 2), (3, 5))
    assert (sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (16, 1.0, (3, 5))


def sources_of(planner):
    """By prompt, where each open ticket's is from."""
    return {int(t.prompt_tokens[0]): planner.source(t.id) for t in [*planner.open_tickets, *planner.long_queue]}


@pytest.mark.parametrize("width", [0, 6])
def test_source_of_a_ticket_is_its_problems_also_after_a_restart_and_a_replacement(width):
    planner = books_of(config_of(4, 2, width=width), problems=Sourced())
    planner.issue_up_to(3, step=0)
    planner.replace(planner.open_tickets[1].id)
    planner.consume(planner.open_tickets[0].id)
    want = {n: f"s{n}" for n in sources_of(planner)}
    assert sources_of(planner) == want and 1 not in want and len(want) >= 3
    resumed = books_of(config_of(4, 2, width=width), problems=Sourced())
    state = json.loads(json.dumps(planner.get_state()))
    resumed.set_state(state, planner.open_tickets)
    assert sources_of(resumed) == want
    assert set(state["sources"]) == {t.id for t in planner.open_tickets}  # and no more


def test_source_of_a_group_is_known_while_its_update_may_be_put_back():
    planner = books_of(config_of(4, 2), problems=Sourced())
    planner.issue(step=0)
    ids = [t.id for t in planner.open_tickets]
    for id_ in ids[:2]:
        planner.consume(id_)
    planner.reopen_update()
    assert [planner.source(i) for i in ids[:2]] == ["s0", "s1"]
    for id_ in ids[:3]:
        planner.consume(id_)
    assert planner.get_state()["sources"] == {ids[3]: "s3"}


def test_source_of_single_problems_takes_no_place_in_the_books():
    planner = books_of(config_of(4, 2))
    planner.issue(step=0)
    assert planner.get_state()["sources"] == {} and planner.source(planner.open_tickets[0].id) == ""
