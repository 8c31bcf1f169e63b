"""Arrivals in a real store: races end, prompts without signal are replaced, nothing is trained under another's id."""

import dataclasses

import numpy as np
import pytest

from bridge.rollout_types import Version
from configs import schema, sections
from configs.sections.teacher import Teacher
from learner.metrics.sample_record import SamplePick
from learner.metrics.step_metrics import RewardMetrics
from learner.schedule.group_filter import MAX_REFUSED_PER_TICKET
from learner.schedule.group_validation import MAX_REFUSED_IN_A_ROW
from learner.schedule.rollout_stream import consume
from learner.update.auto_shape import AutoShape
from tests.bridge.factories import make_group, make_rollout
from tests.learner.schedule.fakes import Problems, Sourced
from tests.learner.schedule.stream_learner import K, Learner

NO_PENALTY = sections.LossConfig()
NO_PROMPTS = sections.PromptsConfig()


class Desk(Learner):
    def __init__(self, store, *, R=2, loss=NO_PENALTY, prompts=NO_PROMPTS, problems=None, step=0, **rounds):
        self.config = schema.Config(
            preset="test",
            run=sections.RunConfig(num_updates=1),
            rounds=sections.RoundsConfig(groups_per_round=R, groups_per_update=R, samples_per_group=K, **rounds),
            loss=loss,
            prompts=prompts,
        )
        super().__init__(store, self.config, prompts=problems or Problems(), step=step)
        self.planner, self.group_filter = self.stream.planner, self.stream.group_filter
        store.put_tickets(self.planner.issue(step=0))

    def arrive(self, order, rewards=(0.0, 1.0), **fields):
        ticket = self.planner.ticket(f"{order:09d}")
        group = make_group(ticket, rollouts=tuple(make_rollout(reward=r) for r in rewards))
        before = self.group_filter.dropped.copy()
        self.group_filter.receive(dataclasses.replace(group, **fields))
        (*reasons,) = self.group_filter.dropped - before
        return reasons[0] if reasons else None

    def offered(self):
        """(order, prompt) of what actors may claim."""
        claimed = self.store.claim("a", limit=99, lease_s=60)
        self.store.release("a", [t.id for t in claimed])
        return [(t.order, int(t.prompt_tokens[0])) for t in claimed]


def test_the_rth_arrival_withdraws_the_losers(store):
    desk = Desk(store, R=2, overprovision_prompts=2.0)
    assert [o for o, _ in desk.offered()] == [0, 1, 2, 3]
    assert desk.arrive(3) is None
    assert len(desk.offered()) == 4
    assert desk.arrive(1) is None
    assert [o for o, _ in desk.offered()] == [1, 3]
    assert [t.order for t in desk.planner.long_queue] == [0, 2]


class Taught(Problems):
    """Problems with an even number name the teacher a."""

    def __call__(self):
        problem = super().__call__()
        teacher = "" if self.next % 2 == 0 else "a"
        return dataclasses.replace(problem, task=dataclasses.replace(problem.task, teacher=teacher))


def test_group_of_equal_rewards_with_a_teacher_trains_and_its_batch_names_the_teacher(store):
    loss = sections.LossConfig(teacher_coef=1.0, teachers={"a": Teacher(path="folder")})
    prompts = sections.PromptsConfig(teacher_field="teacher")
    desk = Desk(store, R=3, filter_zero_variance=True, problems=Taught(), loss=loss, prompts=prompts)
    assert desk.arrive(0, rewards=(1.0, 1.0)) is None
    assert desk.arrive(1, rewards=(1.0, 1.0)) == "zero_variance"  # replaced by problem 3, without a teacher as well
    assert desk.arrive(1) is None
    groups = desk.group_filter.take(2)
    tally, pick = RewardMetrics(loss, max_response_tokens=16), SamplePick(groups_per_round=3, kept_per_round=0)
    [micro] = consume(desk.config, desk.planner, tally, AutoShape(desk.config), groups, pick)
    of_first = groups[0].rollouts
    assert micro.teachers == (1,) and np.sum(micro.batch.teacher_ids) == sum(r.tokens.size for r in of_first)
    assert np.count_nonzero(micro.batch.loss_mask) == 2 * np.sum(micro.batch.teacher_ids)


def test_group_without_signal_makes_way_for_another_prompt_of_its_round(store):
    desk = Desk(store, filter_zero_variance=True)
    assert desk.arrive(0, rewards=(1.0, 1.0)) == "zero_variance"
    assert desk.offered() == [(0, 2), (1, 1)]  # the third problem has the first one's place
    assert desk.arrive(0) is None and len(desk.planner.open_tickets) == 2


def test_group_without_signal_tells_the_prompts_what_it_earned_before_another_takes_its_place(store):
    desk = Desk(store, filter_zero_variance=True, problems=Sourced())
    desk.arrive(0, rewards=(1.0, 1.0))
    assert desk.prompts.observed == [("s0", 1.0)] and desk.planner.source("000000000") == "s2"
    desk.arrive(1)  # waits to be trained; then it is told
    assert desk.prompts.observed == [("s0", 1.0)]


def test_group_without_signal_that_is_let_through_is_not_told_twice(store):
    desk = Desk(store, filter_zero_variance=True, problems=Sourced(), R=1)
    for _ in range(10):
        desk.arrive(0, rewards=(1.0, 1.0))
    assert desk.arrive(0, rewards=(1.0, 1.0)) is None  # ten were replaced: this one is trained
    assert len(desk.prompts.observed) == 10


def test_signal_is_looked_for_in_the_rewards_as_judged(store):
    desk = Desk(store, filter_zero_variance=True, loss=sections.LossConfig(overlong_buffer_tokens=8))
    lengths = (3, 14)  # of at most 16, the last 8 punished: advantages, but all are right
    assert desk.arrive(0, rollouts=tuple(make_rollout(n, reward=1.0) for n in lengths)) == "zero_variance"
    assert desk.arrive(1, rollouts=tuple(make_rollout(n, reward=float(n > 3)) for n in lengths)) is None


def test_group_of_masked_responses_alone_has_no_signal(store):
    cut = tuple(make_rollout(16, reward=r, finish="length") for r in (0.0, 1.0))
    desk = Desk(store, filter_zero_variance=True, prompts=sections.PromptsConfig(truncated_responses="mask"))
    assert desk.arrive(0, rollouts=cut) == "zero_variance"
    assert desk.arrive(1, rollouts=(cut[0], make_rollout(reward=1.0))) is None


BAD = {
    "out_of_vocabulary": make_rollout(tokens=np.array([1, 2, 10**9], np.int32)),
    "future_version": make_rollout(step=1),
    "impossible_logprob": make_rollout(behavior_logprobs=np.full(3, -3e38, np.float32)),
    "extreme_reward": make_rollout(reward=1e308),
    "too_long": make_rollout(17),
    "wrong_size": None,
}


@pytest.mark.parametrize("reason", BAD)
def test_group_that_can_not_be_right_is_counted_and_asked_for_again(store, reason):
    desk = Desk(store)
    bad = BAD[reason]
    rollouts = (make_rollout(),) if bad is None else (make_rollout(), bad)
    assert desk.arrive(0, rollouts=rollouts) == reason
    assert desk.offered() == [(0, 0), (1, 1)] and desk.group_filter.take(9) == []
    assert desk.arrive(0) is None  # a good one is taken all the same


def test_group_of_an_abandoned_future_is_that_and_not_of_a_future_version(store):
    store.record_restore(1, 0)  # a learner that began after incarnation 0's at step 0
    assert Desk(store).arrive(0, rollouts=(make_rollout(step=3),) * K) == "abandoned"


def test_group_with_abandoned_tokens_behind_newer_ones_is_kept_out(store):
    """0:4 and 0:5, after which a learner went back to 3, then 1:5 of the next one."""
    store.acquire_leadership("here", lease_s=60)
    rollouts = tuple(make_rollout(4, token_versions=np.array([4, 4, 5, 5], np.int32)) for _ in range(K))
    older = (Version(incarnation=0, step=5),)
    desk = Desk(store, step=3)
    desk.group_filter.step = 5
    assert desk.arrive(0, rollouts=rollouts, incarnation=1, older_versions=older) == "abandoned"
    assert desk.arrive(1, rollouts=rollouts, incarnation=1, older_versions=(Version(incarnation=0, step=3),)) is None


def test_ticket_whose_groups_are_refused_again_and_again_gets_another_prompt(store):
    desk = Desk(store)
    bad = (make_rollout(), BAD["extreme_reward"])
    for _ in range(MAX_REFUSED_PER_TICKET - 1):
        assert desk.arrive(0, rollouts=bad) == "extreme_reward"
        assert desk.offered() == [(0, 0), (1, 1)]
    assert desk.arrive(0, rollouts=bad) == "extreme_reward"
    assert desk.offered() == [(0, 2), (1, 1)]  # the third problem has the first one's place
    assert desk.group_filter.dropped["extreme_reward"] == MAX_REFUSED_PER_TICKET


def test_actor_that_makes_nothing_right_is_fenced_and_one_that_errs_is_not(store):
    desk = Desk(store, R=2)
    bad = (make_rollout(), BAD["out_of_vocabulary"])
    for _ in range(MAX_REFUSED_IN_A_ROW - 1):
        desk.arrive(0, rollouts=bad)
        desk.arrive(0, rollouts=bad, actor="errs")
    assert desk.arrive(1, actor="errs") is None
    desk.arrive(0, rollouts=bad, actor="errs")
    assert store.fenced_actors() == set()
    desk.arrive(0, rollouts=bad)
    assert store.fenced_actors() == desk.group_filter.fenced_actors == {"a"}
    assert desk.arrive(0) == "fenced"


def test_group_of_another_prompt_than_its_ticket_has_is_kept_out_and_the_right_one_offered(store):
    desk = Desk(store)
    stranger = np.array([77], np.int32)
    store.withdraw(["000000000"])
    store.put_tickets([dataclasses.replace(desk.planner.ticket("000000000"), prompt_tokens=stranger)])
    assert desk.arrive(0, prompt_tokens=stranger) == "other_prompt"
    assert desk.offered() == [(0, 0), (1, 1)]
