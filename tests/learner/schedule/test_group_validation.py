import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import MAX_ABS_REWARD, Sampling, Version
from configs.sections import LossConfig
from configs.sections.loss_table import ADVANTAGE_NAMES
from learner.metrics.metric_names import METRICS
from learner.model.routing_replay import RoutingShape
from learner.objective.advantages import group_advantages
from learner.schedule.group_validation import (
    MAX_REFUSED_IN_A_ROW,
    MIN_LOGPROB,
    REASONS,
    GroupLimits,
    InvalidGroup,
    RejectionCounter,
    objection,
)
from tests.bridge.factories import make_group, make_rollout, make_ticket

VOCAB = 100
TICKET = make_ticket(num_samples=2, sampling=Sampling(max_tokens=8))  # a prompt of two tokens
LIMITS = GroupLimits(vocab_size=VOCAB, max_tokens=10)
NEWEST = Version(incarnation=2, step=5)


def group(**second):
    """Two responses of three tokens by weights of step 5, the second with these fields."""
    good = make_rollout(step=5)
    return make_group(TICKET, incarnation=2, rollouts=(good, dataclasses.replace(good, **second)))


def reason(group, limits=LIMITS):
    found = objection(group, TICKET, limits, newest=NEWEST)
    return found and found.reason


def ids(*tokens):
    return np.array(tokens, np.int32)


def logprobs(*values):
    return np.array(values, np.float32)


def test_group_within_its_limits_is_let_in():
    assert reason(group()) is None
    assert reason(group(tokens=ids(0, 1, VOCAB - 1))) is None
    assert reason(make_group(TICKET, incarnation=2, rollouts=(make_rollout(8, step=5),) * 2)) is None


def test_group_without_the_logprobs_of_its_teacher_on_a_server_is_rejected():
    limits = dataclasses.replace(LIMITS, server_teachers=frozenset({""}))
    assert reason(group(), limits) == "missing_teacher"
    taught = dataclasses.replace(make_rollout(step=5), teacher_logprobs=logprobs(-1, -2, -3))
    both = make_group(TICKET, incarnation=2, rollouts=(taught, taught))
    assert reason(both, limits) is None
    assert reason(dataclasses.replace(both, rollouts=(taught, make_rollout(step=5))), limits) == "missing_teacher"
    assert reason(group(), dataclasses.replace(LIMITS, server_teachers=frozenset({"other"}))) is None
    evaluation = dataclasses.replace(TICKET, kind="eval")
    assert objection(group(), evaluation, limits, newest=NEWEST) is None


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        (dict(tokens=ids(1, 2, 10**9)), "out_of_vocabulary"),
        (dict(tokens=ids(1, 2, VOCAB)), "out_of_vocabulary"),
        (dict(tokens=ids(-5, 2, 3)), "out_of_vocabulary"),
        (dict(token_versions=ids(5, 5, 6)), "future_version"),
        (dict(behavior_logprobs=logprobs(-1, -3e38, -1)), "impossible_logprob"),
        (dict(behavior_logprobs=logprobs(-1, -105, -1)), "impossible_logprob"),
        (dict(reward=1e308), "extreme_reward"),
        (dict(reward=-1e308), "extreme_reward"),
        (dict(reward=1e9), "extreme_reward"),
        (dict(turn_rewards=np.array([-2e6], np.float32)), "extreme_reward"),
    ],
)
def test_response_that_can_not_be_right_is_told_by_its_reason(fields, want):
    assert reason(group(**fields)) == want


def test_routing_is_looked_at_only_where_it_is_replayed():
    rows = np.zeros((4, 3, 2), np.uint8)  # the same expert twice: of a router that was not captured
    assert reason(group(routed_experts=rows)) is None
    replaying = dataclasses.replace(LIMITS, routing=RoutingShape(3, 2, 8))
    assert reason(group(routed_experts=rows), replaying) == "impossible_routing"
    rows = rows + np.arange(2, dtype=np.uint8)
    assert reason(group(routed_experts=rows), replaying) is None


def test_group_that_can_not_be_right_is_told_by_its_reason():
    rollouts = group().rollouts
    for of_group, want in (
        (make_group(TICKET, incarnation=2, rollouts=rollouts[:1]), "wrong_size"),
        (make_group(TICKET, incarnation=2, rollouts=rollouts * 2), "wrong_size"),
        (make_group(TICKET, incarnation=3, rollouts=rollouts), "future_version"),
        (make_group(TICKET, incarnation=2, rollouts=(make_rollout(9, step=5),) * 2), "too_long"),
        (make_group(TICKET, incarnation=2, rollouts=rollouts, prompt_tokens=ids(1, -1)), "out_of_vocabulary"),
        (make_group(TICKET, incarnation=2, rollouts=rollouts, prompt_tokens=ids(*range(8))), "too_long"),
    ):
        assert reason(of_group) == want
    assert reason(make_group(TICKET, incarnation=1, rollouts=rollouts)) is None  # the step that the learner restored


def test_environments_tokens_have_no_logprob_to_look_at():
    mask = np.array([True, False, True])
    assert reason(group(loss_mask=mask, behavior_logprobs=logprobs(-1, -3e38, -1))) is None


def test_turns_that_cancel_each_other_out_are_looked_at_one_by_one():
    mask = np.array([True, False, True])
    for size, want in ((1e9, "extreme_reward"), (1e3, None)):
        turns = np.array([size, -size], np.float32)
        assert reason(group(loss_mask=mask, turn_rewards=turns, reward=0.0)) == want


def test_every_reason_is_a_metric():
    assert {f"groups/{name}" for name in REASONS} <= METRICS.keys()


def test_lowest_logprob_lets_pass_what_float32_can_sample():
    smallest = np.nextafter(np.float32(0), np.float32(1))  # 2^-149
    assert MIN_LOGPROB < math.log(float(smallest)) < MIN_LOGPROB + 1
    assert reason(group(behavior_logprobs=logprobs(-1, math.log(float(smallest)), -1))) is None
    assert np.exp(np.float32(MIN_LOGPROB - 1)) == 0  # a probability that no draw can hit


@given(
    rewards=st.lists(st.floats(-MAX_ABS_REWARD, MAX_ABS_REWARD), min_size=2, max_size=8),
    name=st.sampled_from(sorted({*ADVANTAGE_NAMES} - {"none", "gae"})),  # not of the rewards alone
)
def test_largest_reward_leaves_advantages_that_a_ratio_may_multiply(rewards, name):
    got = group_advantages(np.array(rewards), LossConfig(advantage=name))
    assert np.isfinite(np.square(got.astype(np.float32) * np.float32(math.e**20))).all()
    # A spread of one shows, however far it is from zero.
    near = group_advantages(np.array([MAX_ABS_REWARD - 1, MAX_ABS_REWARD]), LossConfig(advantage=name))
    assert near[1] - near[0] > 0.9


def test_fault_is_that_of_who_made_the_response():
    both = dataclasses.replace(group(reward=1e308), actor="b+a")  # the first response is b's
    assert objection(both, TICKET, LIMITS, newest=NEWEST) == InvalidGroup("extreme_reward", frozenset({"a"}))
    alone = dataclasses.replace(both, actor="b")
    assert objection(alone, TICKET, LIMITS, newest=NEWEST) == InvalidGroup("extreme_reward", frozenset({"b"}))


def test_actor_is_broken_after_so_many_refused_groups_without_a_good_one():
    refusals, both = RejectionCounter(), dataclasses.replace(group(), actor="a+b")
    bad = InvalidGroup("too_long", frozenset({"a"}))
    for _ in range(2):
        assert [refusals.add(both, bad) for _ in range(MAX_REFUSED_IN_A_ROW - 1)] == [[]] * (MAX_REFUSED_IN_A_ROW - 1)
        assert refusals.add(both, None) == []
    assert [refusals.add(both, bad) for _ in range(MAX_REFUSED_IN_A_ROW)][-2:] == [[], ["a"]]
