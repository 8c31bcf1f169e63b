import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import sections
from configs.sections.prompts import PromptSource
from learner.data.mixture import Curriculum

REWARDS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=60)


def config_of(curriculum, **fields):
    mixture = {
        name: PromptSource(task="chain_sum", weight=weight, stage=stage if curriculum == "stages" else 0)
        for name, weight, stage in (("a", 2.0, 1), ("b", 1.0, 1), ("c", 4.0, 5))
    }
    return sections.PromptsConfig(mixture=mixture, curriculum=curriculum, **fields)


def after(config, rewards):
    curriculum = Curriculum(config)
    for name, reward in rewards:
        curriculum.observe(name, reward)
    return curriculum


@given(rewards=REWARDS)
def test_weights_without_a_curriculum_are_the_configs(rewards):
    assert after(config_of("none"), rewards).weights() == {"a": 2.0, "b": 1.0, "c": 4.0}


@given(rewards=REWARDS)
def test_rewards_are_plain_means_until_the_window_is_full(rewards):
    got = after(config_of("none"), rewards).rewards
    means = {n: statistics.fmean(r for m, r in rewards if m == n) for n in {m for m, _ in rewards}}
    assert got == pytest.approx(means)


def test_rewards_of_long_ago_fade():
    rewards = [("a", 0.0)] * 500 + [("a", 1.0)] * 30
    (reward,) = after(config_of("none", curriculum_groups=10), rewards).rewards.values()
    assert reward == pytest.approx(1 - 0.9**30)


@pytest.mark.parametrize(
    ("reward", "factor"),
    [(0.5, 1.0), (0.25, 0.75), (0.75, 0.75), (0.9, 0.36), (1.0, 0.2), (0.0, 0.2), (-3, 0.2), (7, 0.2)],
)
def test_learnable_weight_is_largest_at_half_the_reward_and_never_below_the_floor(reward, factor):
    weights = after(config_of("learnable", learnable_floor=0.2), [("a", reward)] * 5).weights()
    assert weights == pytest.approx({"a": 2.0 * factor, "b": 1.0, "c": 4.0})


def test_stages_end_when_all_their_sources_are_good_enough_and_known_well_enough():
    config = config_of("stages", curriculum_groups=3, stage_reward=0.8, stage_review=0.25)
    first, last = {"a": 2.0, "b": 1.0, "c": 0.0}, {"a": 0.5, "b": 0.25, "c": 4.0}
    good_a, good_b = [("a", 0.9)] * 3, [("b", 0.8)] * 3
    assert after(config, []).weights() == first
    assert after(config, good_a + good_b[:2]).weights() == first
    assert after(config, good_a + [("b", 0.7)] * 9).weights() == first
    passed = after(config, good_a + good_b)
    assert passed.weights() == last and passed.get_state()["stage"] == 5
    resumed = Curriculum(config)
    resumed.set_state(json.loads(json.dumps(passed.get_state())))
    assert resumed.weights() == last and resumed.get_state()["stage"] == 5
    passed.observe("a", 0.0)  # no way back
    assert passed.weights() == last
    for _ in range(9):  # and there is none after the last
        passed.observe("c", 1.0)
    assert passed.weights() == last


@given(rewards=REWARDS, later=REWARDS, kind=st.sampled_from(["none", "learnable", "stages"]))
def test_set_state_midway_gives_the_same_weights_from_there_on(rewards, later, kind):
    config = config_of(kind, curriculum_groups=4, stage_reward=0.5)
    whole = after(config, rewards)
    resumed = Curriculum(config)
    resumed.set_state(json.loads(json.dumps(whole.get_state())))
    for name, reward in later:
        assert resumed.weights() == whole.weights()
        whole.observe(name, reward)
        resumed.observe(name, reward)
    assert resumed.get_state() == whole.get_state()


def test_set_state_knows_sources_that_are_new_and_forgets_those_that_are_gone():
    state = after(config_of("none"), [("a", 1.0), ("c", 0.5)]).get_state()
    mixture = {name: PromptSource(task="chain_sum") for name in ("a", "new")}
    resumed = Curriculum(sections.PromptsConfig(mixture=mixture))
    resumed.set_state(state)
    resumed.observe("c", 0.0)
    assert resumed.rewards == {"a": 1.0} and resumed.weights() == {"a": 1.0, "new": 1.0}
