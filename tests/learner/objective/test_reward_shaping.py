from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from configs.sections import LossConfig, ModelConfig, PackingConfig, RoundsConfig, SamplingConfig
from learner.objective.advantages import has_signal
from learner.objective.reward_shaping import shaped_rewards, shaping_parts

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


def test_shaped_rewards_nan_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        shaped([float("nan")], [3])


KIMI: dict[str, Any] = {"length_penalty": 1.0}


def test_length_penalty_known_numbers():
    # lambda of lengths 10, 20, 30: 0.5, 0, -0.5
    lengths = [10, 20, 30]
    np.testing.assert_allclose(shaped([1.0, 1.0, 1.0], lengths, **KIMI), [1.5, 1.0, 0.5])
    np.testing.assert_allclose(shaped([0.0, 0.0, 0.0], lengths, **KIMI), [0.0, 0.0, -0.5])
    np.testing.assert_allclose(shaped([0.0, 1.0, -1.0], lengths, length_penalty=0.2), [0.0, 1.0, -1.1])


@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=6, max_size=6),
    lengths=st.lists(st.integers(1, 60), min_size=6, max_size=6),
    weight=st.floats(0.01, 3),
)
def test_length_penalty_matches_the_equation_in_plain_python(rewards, lengths, weight):
    got = shaped(rewards, lengths, 100, length_penalty=weight)
    for reward, n, value in zip(rewards, lengths, got, strict=True):
        spread = max(lengths) - min(lengths)
        share = 0.5 - (n - min(lengths)) / spread if spread else 0.0
        if reward <= 0 and share > 0:
            share = 0.0
        np.testing.assert_allclose(value, reward + weight * share, atol=1e-12)


def test_length_penalty_of_equal_lengths_leaves_rewards_alone():
    np.testing.assert_array_equal(shaped([0.0, 1.0], [7, 7], **KIMI), [0, 1])
    np.testing.assert_array_equal(shaped([1.0], [7], **KIMI), [1])


def test_shaping_parts_are_told_apart_and_only_those_that_are_on():
    rewards, lengths = np.array([1.0, 0.0]), np.array([10, 20])

    def parts(**config):
        found = shaping_parts(rewards, lengths, LossConfig(**config), 20)
        return {name: part.tolist() for name, part in found.items()}

    assert parts() == {}
    assert parts(**KIMI) == {"length_penalty": [0.5, -0.5]}
    assert parts(**DAPO, **KIMI) == {"overlong_penalty": [0.0, -2.0], "length_penalty": [0.5, -0.5]}
    # Right and wrong is what the verifiers said: the overlong penalty makes no right answer wrong.
    np.testing.assert_allclose(shaped([1.0, 1.0], [10, 20], **DAPO, **KIMI), [1.5, 1 - 2 - 0.5])
