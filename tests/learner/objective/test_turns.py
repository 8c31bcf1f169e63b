import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sections import LossConfig
from learner.objective.advantages import group_advantages, token_advantages, turn_of_tokens, turn_returns
from tests.bridge.factories import make_rollout

TURN_REWARDS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=5)
EPISODES = st.lists(st.tuples(TURN_REWARDS, st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=5)
"""Of each response the rewards by turn, and what the verifiers gave besides."""


def episode(turn_rewards, end=0.0, *, lengths=None, opens_observed=False, **fields):
    """A response whose turn n has so many sampled tokens, with an observed one before each further turn."""
    parts = [[False] if n or opens_observed else [] for n in range(len(turn_rewards))]
    mask = np.concatenate(
        [part + [True] * k for part, k in zip(parts, lengths or [2] * len(turn_rewards), strict=True)]
    )
    rewards = np.array(turn_rewards, np.float32)
    return make_rollout(
        mask.size, loss_mask=mask.astype(bool), turn_rewards=rewards, reward=end + sum(rewards), **fields
    )


def rewards_of(rollouts):
    return np.array([r.reward for r in rollouts])


def test_turn_returns_known_numbers():
    rewards = np.array([1.0, 0.0, 4.0], np.float32)
    np.testing.assert_array_equal(turn_returns(rewards, 0.0, discount=1.0), [5, 4, 4])
    np.testing.assert_array_equal(turn_returns(rewards, 8.0, discount=0.5), [1 + 0.25 * 12, 0.5 * 12, 12])
    np.testing.assert_array_equal(rewards, [1, 0, 4])


@given(turns=TURN_REWARDS, end=st.floats(-2, 2), discount=st.floats(0.1, 1))
def test_turn_returns_match_the_double_sum(turns, end, discount):
    got = turn_returns(np.array(turns, np.float32), end, discount=discount)
    last = len(turns) - 1
    for n, value in enumerate(got):
        want = sum(discount ** (m - n) * turns[m] for m in range(n, last + 1)) + discount ** (last - n) * end
        np.testing.assert_allclose(value, want, rtol=1e-9, atol=1e-9)


@given(
    group=EPISODES,
    discount=st.sampled_from([1.0, 0.5, 0.9]),
    eps=st.floats(1e-3, 1),
    std=st.sampled_from(["sample", "population"]),
)
def test_turn_grpo_matches_equation_in_plain_python(group, discount, eps, std):
    config = LossConfig(advantage="turn_grpo", turn_discount=discount, advantage_eps=eps, advantage_std=std)
    rollouts = [episode(turns, end) for turns, end in group]
    got = token_advantages(rollouts, rewards_of(rollouts), config)
    returns = []
    for turns, end in group:
        last = len(turns) - 1
        returns.append(
            [
                sum(discount ** (m - n) * turns[m] for m in range(n, last + 1)) + discount ** (last - n) * end
                for n in range(last + 1)
            ]
        )
    every = [g for of_response in returns for g in of_response]
    mean = sum(every) / len(every)
    spread = sum((g - mean) ** 2 for g in every) / (len(every) - (std == "sample"))
    for rollout, advantages, of_response in zip(rollouts, got, returns, strict=True):
        assert advantages.dtype == np.float32 and advantages.shape == rollout.tokens.shape
        want = np.repeat([(g - mean) / (spread**0.5 + eps) for g in of_response], 2)
        np.testing.assert_allclose(advantages[rollout.loss_mask], want, rtol=1e-5, atol=1e-5)


@given(
    rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=9),
    std=st.sampled_from(["sample", "population"]),
    discount=st.sampled_from([1.0, 0.5]),
)
def test_turn_grpo_of_single_turns_is_grpo_to_the_bit(rewards, std, discount):
    rollouts = [make_rollout(2, reward=r) for r in rewards]
    by_turns = LossConfig(advantage="turn_grpo", advantage_std=std, turn_discount=discount)
    whole = LossConfig(advantage="grpo", advantage_std=std)
    got = token_advantages(rollouts, np.array(rewards), by_turns)
    want = token_advantages(rollouts, np.array(rewards), whole)
    np.testing.assert_array_equal(np.array(got), np.array(want))
    np.testing.assert_array_equal(np.array(got)[:, 0], group_advantages(np.array(rewards), whole))


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "mean_baseline"])
def test_other_advantages_of_episodes_are_of_the_summed_reward(advantage):
    rollouts = [episode([1.0, 0.0], 1.0), episode([0.0, 0.25, 0.5]), make_rollout(4, reward=0.1)]
    config = LossConfig(advantage=advantage)
    got = token_advantages(rollouts, rewards_of(rollouts), config)
    want = group_advantages(np.array([2.0, 0.75, 0.1]), config)
    for rollout, advantages, value in zip(rollouts, got, want, strict=True):
        np.testing.assert_array_equal(advantages, np.full(rollout.tokens.size, value))


def test_turn_grpo_mixes_episodes_with_single_turns():
    rollouts = [episode([1.0, 0.0], lengths=[1, 3]), make_rollout(2, reward=2.0)]
    got = token_advantages(rollouts, rewards_of(rollouts), LossConfig(advantage="turn_grpo", advantage_eps=0.5))
    # returns 1, 0 and 2: mean 1, std 1
    np.testing.assert_allclose(got[0], np.array([0, 0, -1, -1, -1]) / 1.5)
    np.testing.assert_allclose(got[1], np.array([1, 1]) / 1.5)


def test_turn_grpo_credits_shaping_at_the_end():
    rollouts = [episode([1.0, 0.0]), episode([0.0, 0.0])]
    config = LossConfig(advantage="turn_grpo", advantage_eps=0.5, turn_discount=0.5)
    got = token_advantages(rollouts, rewards_of(rollouts) + [-2.0, 0.0], config)
    returns = np.array([1 - 0.5 * 2, -2.0, 0.0, 0.0])
    want = (returns - returns.mean()) / (returns.std(ddof=1) + 0.5)
    np.testing.assert_allclose(
        np.concatenate([a[r.loss_mask] for a, r in zip(got, rollouts, strict=True)][:1]),
        np.repeat(want[:2], 2),
        rtol=1e-6,
    )


def test_turn_grpo_of_turns_that_earned_alike_gives_exact_zeros():
    rollouts = [episode([0.0, 0.1]), episode([0.0, 0.0, 0.1])]
    got = token_advantages(rollouts, rewards_of(rollouts), LossConfig(advantage="turn_grpo", advantage_eps=1e-12))
    assert not np.concatenate(got).any()


def test_turn_grpo_reward_that_is_not_finite_is_refused():
    rollouts = [episode([0.0, 1.0]), episode([0.0, 0.0])]
    with pytest.raises(ValueError, match="finite"):
        token_advantages(rollouts, np.array([np.nan, 0.0]), LossConfig(advantage="turn_grpo"))


def test_turn_of_tokens_starts_at_the_first_sampled_one():
    def turns(mask, num_turns=3):
        return turn_of_tokens(np.array(mask, bool), num_turns).tolist()

    assert turns([1, 1, 0, 1, 0, 0, 1]) == [0, 0, 0, 1, 1, 1, 2]
    assert turns([0, 0, 1, 0, 1, 1, 0, 1]) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert turns([1, 0, 1], 1) == [0, 0, 0]
