import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from actor.engine_protocol import Episode, Sample
from actor.rewards.scorer import RewardResult
from actor.serving import Member, build_group
from bridge.rollout_types import Group, RewardScore, Version
from tests.bridge.factories import make_ticket


def sample(token: int, *versions: tuple[int, int]) -> Sample:
    size = len(versions)
    return Sample(
        tokens=np.full(size, token, np.int32),
        logprobs=np.full(size, -0.25, np.float32),
        token_versions=tuple(Version(incarnation=i, step=s) for i, s in versions),
        finish="length",
    )


def judged(reward: float, *scores: RewardScore) -> RewardResult:
    return RewardResult(reward=reward, scores=scores)


def build(*members: tuple[Sample, RewardResult]) -> Group:
    return built({i: (*member, None) for i, member in enumerate(members)}, len(members))


def built(members: dict[int, Member], num_samples: int) -> Group:
    return build_group(make_ticket(num_samples=num_samples), members, actor="a", started_s=3.0, finished_s=4.0)


@settings(deadline=None)
@given(order=st.permutations(range(4)))
def test_build_in_any_order_of_arrival_gives_rollouts_by_index(order):
    members: dict[int, Member] = {}
    for number, index in enumerate(order):
        with pytest.raises(ValueError, match=f"has {number} of 4"):
            built(members, 4)
        members[index] = (sample(index, (0, 0)), judged(float(index)), None)
    group = built(members, 4)
    assert [int(r.tokens[0]) for r in group.rollouts] == [0, 1, 2, 3]
    assert [r.reward for r in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert (group.actor, group.started_s, group.finished_s) == ("a", 3.0, 4.0)


def test_build_over_an_update_keeps_every_tokens_step():
    group = build((sample(7, (0, 4), (0, 4), (1, 5)), judged(1.0)))
    (rollout,) = group.rollouts
    assert rollout.token_versions.tolist() == [4, 4, 5]
    assert rollout.loss_mask.tolist() == [True] * 3
    assert rollout.behavior_logprobs.tolist() == [-0.25] * 3
    assert rollout.finish == "length"
    assert group.incarnation == 1


def test_incarnation_is_the_newest_of_any_sample():
    for versions in itertools.permutations([(0, 3), (2, 3), (1, 3)]):
        assert build(*((sample(0, v), judged(0.0)) for v in versions)).incarnation == 2


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_build_with_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="reward"):
        build((sample(0, (0, 0)), judged(reward)))


def test_build_of_decreasing_steps_is_refused():
    with pytest.raises(ValueError, match="must not decrease"):
        build((sample(0, (0, 5), (1, 4)), judged(0.0)))


def test_build_of_an_episode_trains_what_was_sampled_and_adds_its_turns_rewards():
    response = sample(7, (0, 4), (0, 4), (0, 5), (0, 5), (0, 5))
    sampled = np.array([False, True, False, True, True])
    episode = Episode(sampled=sampled, turn_rewards=np.array([0.5, -0.25], np.float32))
    whole = dataclasses.replace(response, episode=episode, tokens=np.arange(5, dtype=np.int32))
    assert whole.tokens[slice(*whole.turns[-1])].tolist() == [3, 4] and whole.num_sampled == 3
    (rollout,) = build((whole, judged(2.0, RewardScore(name="exact", value=1.0, verdict="ok")))).rollouts
    assert rollout.loss_mask.tolist() == sampled.tolist() and rollout.turn_rewards.tolist() == [0.5, -0.25]
    assert rollout.reward == 2.25 and rollout.scores == (RewardScore(name="exact", value=1.0, verdict="ok"),)


@pytest.mark.parametrize(
    ("mask", "turn"), [("1", [0]), ("101", [2]), ("0110", [1, 2]), ("1001011", [5, 6]), ("1111", [0, 1, 2, 3])]
)
def test_last_turn_is_the_last_run_of_sampled_tokens(mask, turn):
    sampled = np.array([c == "1" for c in mask])
    episode = Episode(sampled=sampled, turn_rewards=np.zeros(0, np.float32))
    tokens = np.arange(sampled.size, dtype=np.int32)
    whole = dataclasses.replace(sample(0, *[(0, 0)] * sampled.size), tokens=tokens, episode=episode)
    assert whole.tokens[slice(*whole.turns[-1])].tolist() == turn


def test_build_names_the_newest_weights_of_each_earlier_incarnation():
    group = build(
        (sample(7, (0, 3), (0, 4), (1, 4)), judged(1.0)),
        (sample(8, (0, 2)), judged(1.0)),
        (sample(9, (1, 4), (1, 6), (3, 6), (3, 7)), judged(0.0)),
    )
    assert [str(v) for v in group.older_versions] == ["0:4", "1:6"]
    assert (group.incarnation, group.older_versions[0].incarnation, group.max_step) == (3, 0, 7)
    for base_steps, is_abandoned in (
        ({1: 4, 2: 6, 3: 6}, False),
        ({1: 3, 2: 6, 3: 6}, True),  # 0:4
        ({1: 4, 2: 5, 3: 5}, True),  # 1:6
        ({1: 4, 3: 6, 4: 6}, True),  # 3:7
        ({1: 4, 3: 6, 4: 7}, False),
    ):
        assert group.is_abandoned(base_steps) == is_abandoned, base_steps


def test_group_has_the_routing_of_its_samples_unless_it_is_only_evaluated():
    ticket = make_ticket(num_samples=1)
    rows = np.zeros((ticket.prompt_tokens.size + 1, 2, 1), np.uint8)
    members = {0: (dataclasses.replace(sample(7, (0, 4), (0, 4)), routed_experts=rows), judged(1.0), None)}
    for kind, wanted in (("train", rows), ("probe", rows), ("eval", UNSET)):
        one = dataclasses.replace(ticket, kind=kind)
        (rollout,) = build_group(one, members, actor="a", started_s=3.0, finished_s=4.0).rollouts
        assert rollout.routed_experts is wanted
