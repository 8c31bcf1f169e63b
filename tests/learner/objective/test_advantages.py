import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import extension
from configs.schema import Config
from configs.sections import LossConfig, ModelConfig, PackingConfig, RoundsConfig, SamplingConfig
from configs.sections.loss import ADVANTAGE_NAMES
from learner.objective.advantages import ADVANTAGES, group_advantages, has_signal, shaped_rewards

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


@given(reward=st.floats(-1e9, 1e9), size=st.integers(1, 64), name=st.sampled_from(sorted(ADVANTAGES)))
def test_zero_variance_group_gives_exact_zeros(reward, size, name):
    rewards = np.full(size, reward)
    assert not has_signal(rewards)
    np.testing.assert_array_equal(
        of(rewards, advantage=name, **({"advantage_eps": 1e-12} if name == "grpo" else {})), np.zeros(size)
    )


def test_has_signal_one_different_reward_is_signal():
    assert has_signal(np.array([0.0, 0.0, 1e-12]))


def test_group_advantages_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        of([0.0, float("nan")])


DAPO = {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0}


def shaped(rewards, lengths, max_response_tokens=20, **config):
    return shaped_rewards(np.array(rewards, np.float64), np.array(lengths), LossConfig(**config), max_response_tokens)


def test_overlong_penalty_falls_linearly_over_the_buffer():
    lengths = [1, 16, 17, 18, 19, 20, 25]
    got = shaped([1.0] * 7, lengths, **DAPO)
    np.testing.assert_allclose(got, [1, 1, 0.5, 0, -0.5, -1, -1])


@given(
    rewards=st.lists(st.floats(-5, 5), min_size=9, max_size=9),
    lengths=st.lists(st.integers(1, 60), min_size=9, max_size=9),
    buffer=st.integers(1, 39),
    penalty=st.floats(0.1, 3),
)
def test_overlong_penalty_matches_the_three_cases_of_the_paper(rewards, lengths, buffer, penalty):
    got = shaped(rewards, lengths, 40, overlong_buffer_tokens=buffer, overlong_penalty=penalty)
    for reward, n, value in zip(rewards, lengths, got, strict=True):
        if n <= 40 - buffer:
            want = 0.0
        elif n <= 40:
            want = ((40 - buffer) - n) / buffer
        else:
            want = -1.0
        np.testing.assert_allclose(value, reward + penalty * want, atol=1e-12)


def test_overlong_penalty_off_leaves_rewards_alone_and_dapo_has_it_on():
    np.testing.assert_array_equal(shaped([0.0, 1.0], [20, 20]), [0, 1])
    np.testing.assert_allclose(shaped([1.0, 1.0], [4096, 6144], 8192, name="dapo"), [1.0, 0.5])


def test_overlong_penalty_gives_a_group_of_equal_rewards_a_signal():
    rewards = shaped([1.0, 1.0], [3, 20], **DAPO)
    assert has_signal(rewards) and not has_signal(np.ones(2))


@pytest.mark.parametrize("longest", [20, 4095, 4096])
def test_overlong_buffer_not_below_a_response_is_refused_as_by_the_config(longest):
    said = rf"overlong_buffer_tokens \((here )?4096.*must be below sampling.max_response_tokens \({longest}\)"
    with pytest.raises(ValueError, match=said):
        shaped([1.0], [3], longest, name="dapo")
    sections = {"model": ModelConfig(max_tokens=8192), "packing": PackingConfig(row_tokens=8192)}
    with pytest.raises(ValueError, match=said):
        Config(
            preset="t", loss=LossConfig(name="dapo"), sampling=SamplingConfig(max_response_tokens=longest), **sections
        )


def test_overlong_buffer_one_below_a_response_is_taken_as_by_the_config():
    np.testing.assert_allclose(shaped([1.0], [4097], 4097, name="dapo"), [0.0])
    Config(
        preset="t",
        loss=LossConfig(name="dapo"),
        rounds=RoundsConfig(filter_zero_variance=True),
        sampling=SamplingConfig(max_response_tokens=4097),
        model=ModelConfig(max_tokens=8192),
        packing=PackingConfig(row_tokens=8192),
    )


def test_advantages_registry_and_config_have_the_same_names():
    assert set(ADVANTAGES) == set(ADVANTAGE_NAMES)


def doubled(rewards, config):
    return 2 * rewards


def test_advantage_of_ones_own_is_looked_up_once(monkeypatch):
    names = []

    def load(field, name, wanted):
        names.append(name)
        return doubled

    monkeypatch.setattr(extension, "load", load)
    config = LossConfig(advantage=f"{__name__}:doubled")
    for _ in range(3):
        np.testing.assert_array_equal(group_advantages(np.array([0.0, 1.0]), config), [0.0, 2.0])
    assert names == [config.advantage]


def test_shaped_rewards_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        shaped([float("nan")], [3])
