import dataclasses

import numpy as np
import pytest

from learner.objective.normalization import token_weight
from learner.objective.trained import teaches, trained_tokens
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
    assert teaches(group(*(make_rollout(reward=r) for r in rewards)), masks_truncated=False) == want


def test_group_teaches_what_its_masked_responses_leave():
    done, cut = make_rollout(reward=1.0), make_rollout(reward=0.0, finish="length")
    assert teaches(group(done, cut), masks_truncated=True)  # the complete one is better than the group's mean
    all_cut = group(cut, dataclasses.replace(cut, reward=1.0))
    assert not teaches(all_cut, masks_truncated=True)
    assert teaches(all_cut, masks_truncated=False)


@pytest.mark.parametrize("normalization", ["token", "sequence", "sequence_sum", "constant"])
def test_sequence_that_does_not_train_adds_nothing_to_either_sum(normalization):
    assert token_weight(normalization, 0, 12) == (0.0, 0)
