import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import LossConfig
from learner.advantages import group_advantages, has_signal

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=9)


def of(rewards, **config):
    return group_advantages(np.array(rewards, np.float64), LossConfig(**config))


def test_grpo_known_numbers():
    # mean 1, population std sqrt(2): (0 - 1) / (sqrt(2) + eps) ...
    got = of([0.0, 0.0, 1.0, 3.0], advantage="grpo", advantage_eps=0.5)
    std = ((1 + 1 + 0 + 4) / 4) ** 0.5
    np.testing.assert_allclose(got, np.array([-1, -1, 0, 2]) / (std + 0.5), rtol=1e-6)


def test_mean_baseline_known_numbers():
    np.testing.assert_array_equal(of([0.0, 1.0, 5.0], advantage="mean_baseline"), [-2, -1, 3])


@given(rewards=REWARDS, eps=st.floats(1e-6, 1))
def test_grpo_matches_equation_in_plain_python(rewards, eps):
    got = of(rewards, advantage="grpo", advantage_eps=eps)
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    if len(set(rewards)) > 1:
        np.testing.assert_allclose(got, [(r - mean) / (std + eps) for r in rewards], rtol=1e-5, atol=1e-6)
    assert np.isfinite(got).all()


@given(reward=st.floats(-1e9, 1e9), size=st.integers(1, 64), name=st.sampled_from(["grpo", "mean_baseline"]))
def test_zero_variance_group_gives_exact_zeros(reward, size, name):
    rewards = np.full(size, reward)
    assert not has_signal(rewards)
    np.testing.assert_array_equal(of(rewards, advantage=name, advantage_eps=1e-12), np.zeros(size))


def test_has_signal_one_different_reward_is_signal():
    assert has_signal(np.array([0.0, 0.0, 1e-12]))


def test_group_advantages_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        of([0.0, float("nan")])
