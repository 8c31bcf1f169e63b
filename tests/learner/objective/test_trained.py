import dataclasses

import numpy as np
import pytest

from configs.sections import LossConfig
from learner.objective.losses import token_weight
from learner.objective.reward_shaping import has_learning_signal, num_sampled, trained_tokens
from tests.bridge.factories import make_group, make_rollout, make_ticket


def group(*rollouts):
    return make_group(make_ticket(num_samples=len(rollouts)), rollouts=rollouts)


def test_trained_tokens_are_the_sampled_ones_and_none_of_a_masked_response():
    mask = np.array([True, False, True])
    for finish, masks_truncated, want in (
        ("stop", False, mask),
        ("length", False, mask),
        ("stop", True, mask),
        ("length", True, np.zeros(3, bool)),
    ):
        rollout = make_rollout(3, loss_mask=mask, finish=finish)
        np.testing.assert_array_equal(trained_tokens(rollout, masks_truncated=masks_truncated), want)


@pytest.mark.parametrize(
    ("rewards", "want"),
    [
        ((0.0, 0.0, 0.0), False),  # none correct
        ((0.0, 1.0, 0.0), True),
        ((1.0, 1.0, 1.0), False),  # all correct
        ((0.25, 0.25, 0.25), False),
        ((0.0, 0.25, 0.0), True),  # partly right: better than the others
    ],
)
def test_group_teaches_where_some_and_not_all_are_right(rewards, want):
    assert (
        has_learning_signal(group(*(make_rollout(reward=r) for r in rewards)), LossConfig(), masks_truncated=False)
        == want
    )


def test_group_teaches_what_its_masked_responses_leave():
    done, cut = make_rollout(reward=1.0), make_rollout(reward=0.0, finish="length")
    assert has_learning_signal(
        group(done, cut), LossConfig(), masks_truncated=True
    )  # the complete one is better than the group's mean
    all_cut = group(cut, dataclasses.replace(cut, reward=1.0))
    assert not has_learning_signal(all_cut, LossConfig(), masks_truncated=True)
    assert has_learning_signal(all_cut, LossConfig(), masks_truncated=False)
    equal = group(done, done)
    assert has_learning_signal(equal, LossConfig(), masks_truncated=True, has_teacher=True)
    assert not has_learning_signal(all_cut, LossConfig(), masks_truncated=True, has_teacher=True)


def test_group_of_equal_rewards_teaches_with_a_critic_unless_all_are_masked():
    one, cut = make_rollout(reward=1.0), make_rollout(reward=1.0, finish="length")
    critic = LossConfig(advantage="gae")
    assert has_learning_signal(group(one), critic, masks_truncated=True)
    assert has_learning_signal(group(one, one), critic, masks_truncated=True)
    assert not has_learning_signal(group(cut), critic, masks_truncated=True)


@pytest.mark.parametrize("normalization", ["token", "sequence", "sequence_sum", "constant"])
def test_sequence_that_does_not_train_adds_nothing_to_either_sum(normalization):
    assert token_weight(normalization, 0, 12) == (0.0, 0)


def test_group_teaches_by_turns_where_its_turns_earned_otherwise():
    mask = np.array([True, False, True])

    def episode(*turn_rewards, **fields):
        return make_rollout(
            3, loss_mask=mask, turn_rewards=np.array(turn_rewards, np.float32), reward=sum(turn_rewards), **fields
        )

    by_turns = LossConfig(advantage="turn_grpo")
    early_and_late = group(episode(1.0, 0.0), episode(0.0, 1.0))
    assert has_learning_signal(early_and_late, by_turns, masks_truncated=False)
    assert not has_learning_signal(early_and_late, LossConfig(), masks_truncated=False)  # all earned 1
    assert not has_learning_signal(group(episode(0.0, 1.0), episode(0.0, 1.0)), by_turns, masks_truncated=False)
    cut = group(episode(1.0, 0.0, finish="length"), episode(0.0, 1.0, finish="length"))
    assert not has_learning_signal(cut, by_turns, masks_truncated=True)
    # Discounted, what comes late is worth less before it comes.
    late = group(episode(0.0, 1.0))
    assert has_learning_signal(late, dataclasses.replace(by_turns, turn_discount=0.5), masks_truncated=False)


def test_num_sampled_leaves_out_what_was_observed():
    assert num_sampled(make_rollout(4, loss_mask=np.array([False, True, False, True]))) == 2
