import dataclasses

import numpy as np
import pytest

from bridge.rollout_types import RewardPart, Sampling, Task, Version
from learner.data.problem import Problem
from learner.evaluation.pinned_requests import PinnedRequests, pinned_tickets, probe_problems
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner.schedule.fakes import Problems

V3 = Version(incarnation=1, step=3)


def problems(count, samples=2):
    return [
        (Problem(str(n), np.array([n], np.int32), Task.judged_by("exact", answer="")), samples) for n in range(count)
    ]


class Actor:
    """Serves one claimed ticket on each poll, by the next weights of its script."""

    def __init__(self, store, *weights):
        """`weights` are (incarnation, oldest step, newest step), the last one for ever."""
        self.store, self.weights, self.served = store, list(weights), []

    def __call__(self):
        tickets = self.store.claim("actor", limit=1, lease_s=1000)
        assert tickets, "the learner waits for a ticket that was never offered"
        (ticket,) = tickets
        incarnation, oldest, newest = self.weights.pop(0) if len(self.weights) > 1 else self.weights[0]
        self.served.append(ticket.id)
        rollouts = [make_rollout(step=oldest), *(make_rollout(step=newest) for _ in range(ticket.num_samples - 1))]
        self.store.put_group(make_group(ticket, actor="actor", rollouts=tuple(rollouts), incarnation=incarnation))


def ask(pinned, count=2, *, version=V3):
    pinned.start(problems(count), Sampling(max_tokens=4), version=version, round=0)


def requested(kind, store, *weights, count=2, on_wait=None, **how):
    """An actor that serves by these weights, and requests that wait for it."""
    actor = Actor(store, *weights)
    pinned = PinnedRequests(kind, store, on_wait=on_wait or actor, **how)
    ask(pinned, count)
    return actor, pinned


def test_settle_waits_for_all_and_returns_them_in_order(store):
    store.put_tickets([make_ticket("train-0", order=0)])  # a training ticket never comes before a pinned one
    actor, pinned = requested("eval", store, (1, 3, 3), count=3)
    assert pinned.version == V3
    groups = pinned.wait()
    assert [g.prompt_tokens[0] for g in groups] == [0, 1, 2]
    assert pinned.version is None
    assert store.counts() | {"acknowledged": 3, "open": 1, "reissued": 0} == store.counts()


def test_start_sends_no_more_than_its_limit_and_settle_the_rest(store):
    actor = Actor(store, (1, 3, 3))
    pinned = PinnedRequests("eval", store, on_wait=actor)
    pinned.start(problems(4), Sampling(max_tokens=4), version=V3, round=0, limit=5)
    assert (store.counts()["open"], pinned.num_pending, pinned.num_unsent) == (2, 4, 2)  # of two samples each
    actor()
    assert not pinned.poll() and pinned.num_pending == 2
    pinned.send(2)
    assert (pinned.num_pending, pinned.num_unsent) == (4, 1)
    assert [g.prompt_tokens[0] for g in pinned.wait()] == [0, 1, 2, 3] and len(actor.served) == 4


def test_ticket_of_more_samples_than_there_is_room_for_goes_out_alone(store):
    pinned = PinnedRequests("eval", store, on_wait=lambda: None)
    pinned.start(problems(2, samples=8), Sampling(max_tokens=4), version=V3, round=0, limit=3)
    assert (store.counts()["open"], pinned.num_pending) == (1, 8)
    pinned.send(3)
    assert store.counts()["open"] == 1


def test_poll_gives_up_what_an_actor_made_before_it_was_fenced(store):
    actor, fenced = Actor(store, (1, 3, 3)), set[str]()
    pinned = PinnedRequests("eval", store, on_wait=lambda: None, fenced_actors=lambda: fenced)
    ask(pinned, 2)
    actor()
    assert not pinned.poll()  # the first is taken
    store.fence("actor", "it serves other weights")
    fenced.add("actor")
    assert not pinned.poll()
    (again,) = store.claim("other", limit=1, lease_s=1000)
    store.put_group(make_group(again, rollouts=(make_rollout(step=3),) * 2, actor="other", incarnation=1))
    (last,) = store.claim("other", limit=1, lease_s=1000)
    store.put_group(make_group(last, rollouts=(make_rollout(step=3),) * 2, actor="other", incarnation=1))
    assert [g.actor for g in pinned.wait()] == ["other", "other"]


@pytest.mark.parametrize(
    "other",
    [
        (1, 2, 2),  # older weights
        (1, 2, 3),  # swapped in the middle
        (1, 3, 4),
        (0, 3, 3),  # the same step of an abandoned learner
    ],
)
def test_settle_group_of_other_weights_is_asked_for_again(store, other):
    actor, pinned = requested("probe", store, other, (1, 3, 3))
    groups = pinned.wait()
    assert len(actor.served) == 3 and len(set(actor.served)) == 2
    assert {(g.incarnation, g.min_step, g.max_step) for g in groups} == {(1, 3, 3)}
    assert store.counts()["reissued"] == 1


@pytest.mark.parametrize("other", [(1, 2, 4), (0, 3, 4), (2, 4, 4)])
def test_in_flight_newer_weights_do_older_and_abandoned_ones_do_not(store, other):
    actor, pinned = requested("eval", store, other, (1, 3, 3), (1, 3, 5), is_exact=False)
    groups = pinned.wait()
    assert len(actor.served) == 3 and store.counts()["reissued"] == 1
    assert (min(g.min_step for g in groups), max(g.max_step for g in groups)) == (3, 5)


def test_poll_takes_in_what_is_there_and_waits_for_nothing(store):
    actor, pinned = requested("eval", store, (1, 3, 3), on_wait=lambda: pytest.fail("it waited"))
    assert not pinned.poll()
    actor()
    assert not pinned.poll()
    actor()
    assert pinned.poll() and len(pinned.wait()) == 2


def test_groups_that_are_awaited_are_still_to_be_accepted(store):
    actor, pinned = requested("probe", store, (1, 3, 3))
    pinned.await_groups()
    assert len(actor.served) == 2
    seen = []
    assert len(pinned.wait(lambda group, ticket: not seen.append(group.ticket_id))) == len(seen) == 2


class WaitsError(Exception):
    """The learner waits."""


def test_group_of_other_weights_does_not_count_as_arrived(store):
    def waits():
        raise WaitsError

    actor, pinned = requested("probe", store, (0, 3, 3), count=1, on_wait=waits)
    actor()
    with pytest.raises(WaitsError):
        pinned.await_groups()


def test_ticket_that_no_actor_can_complete_is_not_awaited(store):
    pinned = PinnedRequests("probe", store, on_wait=lambda: pytest.fail("it waits"))
    ask(pinned, 1)
    (ticket,) = store.claim("actor", limit=1, lease_s=60)
    store.fail_ticket(ticket.id, "why", max_attempts=1)
    pinned.await_groups()
    assert pinned.wait() == [] and store.counts()["failed"] == 0  # else the learner reads it for the rest of the run


def test_settle_group_that_is_not_accepted_is_asked_for_again(store):
    actor, pinned = requested("probe", store, (1, 3, 3))
    answers = iter([False, True, False, True])
    groups = pinned.wait(lambda group, ticket: ticket.id == group.ticket_id and next(answers))
    assert len(groups) == 2 and len(actor.served) == 4
    assert next(answers, None) is None


def test_settle_twice_the_second_version_does_not_see_the_firsts_groups(store):
    actor, pinned = requested("eval", store, (1, 3, 3), (1, 3, 3), (1, 4, 4))
    first = pinned.wait()
    ask(pinned, 2, version=Version(incarnation=1, step=4))
    second = pinned.wait()
    assert not {g.ticket_id for g in first} & {g.ticket_id for g in second}
    assert {g.max_step for g in second} == {4}


def test_settle_evaluation_leaves_probe_groups_alone(store):
    actor = Actor(store, (1, 3, 3))
    probe = PinnedRequests("probe", store, on_wait=actor)
    evaluation = PinnedRequests("eval", store, on_wait=actor)
    ask(probe, 1)
    ask(evaluation, 1)
    assert [g.kind for g in evaluation.wait()] == ["eval"]
    assert [g.kind for g in probe.wait()] == ["probe"]


def test_start_before_the_last_was_settled_is_refused(store):
    pinned = PinnedRequests("eval", store, on_wait=lambda: None)
    ask(pinned)
    with pytest.raises(RuntimeError, match="eval tickets of 1:3 are still in progress"):
        ask(pinned)


def test_settle_with_nothing_out_returns_at_once(store):
    assert PinnedRequests("eval", store, on_wait=lambda: None).wait() == []


def test_probe_problems_are_single_turns_of_the_same_prompts():
    plain = Problem("a", np.array([1], np.int32), Task.judged_by("math", answer="1"))
    played = Problem(
        "b", np.array([2, 3], np.int32), Task(rewards=(), answer="", metadata='{"x": 1}', environment="guess")
    )
    judged = dataclasses.replace(plain, task=dataclasses.replace(plain.task, environment="guess"))
    (first, num), (second, _) = probe_problems([plain, played, judged])
    assert first is plain and num == 2
    assert second.prompt_tokens is played.prompt_tokens and second.task.environment == ""
    assert second.task.rewards == (RewardPart("exact"),)
    ((alone, _),) = probe_problems([judged])
    assert alone.task == plain.task


def test_pinned_tickets_come_first_and_ask_for_the_version():
    problems = Problems()
    version = Version(incarnation=2, step=30)
    pairs = [(problems(), 1), (problems(), 3)]
    evals = pinned_tickets("eval", pairs, Sampling(max_tokens=4), version=version, round=5)
    probes = pinned_tickets("probe", pairs, Sampling(max_tokens=4), version=version, round=5)
    assert [t.num_samples for t in evals] == [1, 3]
    assert {t.min_version for t in evals + probes} == {version}
    assert {t.kind for t in evals} == {"eval"} and {t.kind for t in probes} == {"probe"}
    assert len({t.id for t in evals + probes}) == 4
    # Probes before evaluations before any training ticket, each in its own order.
    orders = [t.order for t in probes + evals]
    assert orders == sorted(orders) and orders[-1] < 0
