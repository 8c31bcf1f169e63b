import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import custom_functions
from configs.sections import LossConfig
from configs.sections.loss_table import ADVANTAGE_NAMES
from learner.objective.advantages import ADVANTAGES, group_advantages, has_signal, token_advantages
from tests.learner.objective.test_check_custom import response

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=9)


def of(rewards, **config):
    return group_advantages(np.array(rewards, np.float64), LossConfig(**config))


def test_grpo_known_numbers():
    # mean 1, squares 1 + 1 + 0 + 4 = 6
    got = of([0.0, 0.0, 1.0, 3.0], advantage="grpo", advantage_eps=0.5)
    np.testing.assert_allclose(got, np.array([-1, -1, 0, 2]) / ((6 / 3) ** 0.5 + 0.5), rtol=1e-6)
    got = of([0.0, 0.0, 1.0, 3.0], advantage="grpo", advantage_eps=0.5, advantage_std="population")
    np.testing.assert_allclose(got, np.array([-1, -1, 0, 2]) / ((6 / 4) ** 0.5 + 0.5), rtol=1e-6)


@pytest.mark.parametrize(("std", "size"), [("sample", 0.5**0.5), ("population", 1.0)])
def test_grpo_of_two_has_one_size_of_advantage(std, size):
    np.testing.assert_allclose(of([0.0, 1.0], advantage_std=std), [-size, size], rtol=1e-5)
    np.testing.assert_allclose(of([-7.0, 2.0], advantage_std=std), [-size, size], rtol=1e-5)


@pytest.mark.parametrize("name", ["mean_baseline", "dr_grpo"])
def test_mean_baseline_known_numbers(name):
    np.testing.assert_array_equal(of([0.0, 1.0, 5.0], advantage=name), [-2, -1, 3])


@given(rewards=REWARDS)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards):
    want = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(of(rewards, advantage="rloo"), want, rtol=1e-5, atol=1e-6)


@given(rewards=REWARDS, eps=st.floats(1e-6, 1), less=st.sampled_from([0, 1]))
def test_grpo_matches_equation_in_plain_python(rewards, eps, less):
    got = of(rewards, advantage="grpo", advantage_eps=eps, advantage_std=("population", "sample")[less])
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - less)) ** 0.5
    if len(set(rewards)) > 1:
        np.testing.assert_allclose(got, [(r - mean) / (std + eps) for r in rewards], rtol=1e-5, atol=1e-6)
    assert np.isfinite(got).all()


@given(reward=st.floats(-1e9, 1e9), size=st.integers(1, 64), name=st.sampled_from(sorted(ADVANTAGES.keys() - {"none"})))
def test_zero_variance_group_gives_exact_zeros(reward, size, name):
    rewards = np.full(size, reward)
    assert not has_signal(rewards)
    np.testing.assert_array_equal(
        of(rewards, advantage=name, **({"advantage_eps": 1e-12} if name == "grpo" else {})), np.zeros(size)
    )


def test_has_signal_one_different_reward_is_signal():
    assert has_signal(np.array([0.0, 0.0, 1e-12]))


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3],
        [0.7 * 0.1 + 0.2, 0.27, 0.27],
        [0.1 + 0.2 - 0.3, 0.0, 0.0],
        np.array([np.float32(0.1) + np.float32(0.2), np.float32(0.3)], np.float64),
        [-1e6, -1e6 * (1 + 1e-15)],
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_no_signal_and_give_no_advantage(rewards):
    assert not has_signal(np.array(rewards, np.float64))
    assert np.all(of(list(rewards)) == 0)


def test_group_advantages_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        of([0.0, float("nan")])


def test_advantages_registry_and_config_have_the_same_names():
    assert {*ADVANTAGES, "gae"} == set(ADVANTAGE_NAMES)  # gae is no function of a group's rewards


def doubled(rewards, config):
    return 2 * rewards


def test_advantage_of_ones_own_is_looked_up_once(monkeypatch):
    names = []

    def load(field, name, wanted):
        names.append(name)
        return doubled

    monkeypatch.setattr(custom_functions, "load", load)
    config = LossConfig(advantage=f"{__name__}:doubled")
    for _ in range(3):
        group = [response(0.0), response(1.0)]
        np.testing.assert_array_equal(token_advantages(group, np.array([0.0, 1.0]), config), [[0, 0], [2, 2]])
    assert names == [config.advantage]
