import numpy as np
import pytest

from bridge.rollout_types import RewardPart, RewardScore, Task
from configs.sections import LossConfig
from learner.metrics.metric_names import meaning
from learner.metrics.step_metrics import RewardMetrics
from tests.bridge.factories import make_group, make_rollout, make_ticket

MATH = Task(rewards=(RewardPart("math"), RewardPart("format", 0.1)), answer="1")
PLAYED = Task(rewards=(), answer="", environment="guess")
NOTHING = {f"verdicts/{kind}": 0.0 for kind in ("ok", "wrong", "timeout", "hang", "unscored")}


def tally_of(**config):
    return RewardMetrics(LossConfig(**config), max_response_tokens=20)


def group(*rollouts):
    return make_group(make_ticket(num_samples=len(rollouts)), rollouts=rollouts)


def scored(*scores, num_tokens=3, **fields):
    """A response with (verifier, score, verdict) each."""
    given = tuple(RewardScore(name=n, value=v, verdict=verdict) for n, v, verdict in scores)
    return make_rollout(num_tokens, scores=given, **fields)


def episode(*turn_rewards, observed=1):
    """Of turns of one token, so many observed ones before each."""
    mask = np.array(([False] * observed + [True]) * len(turn_rewards))
    return make_rollout(mask.size, loss_mask=mask, turn_rewards=np.array(turn_rewards, np.float32))


def test_tally_counts_verdicts_by_kind_and_means_scores_by_verifier_over_groups():
    tally = tally_of()
    tally.add(
        group(
            scored(("math", 1.0, "ok"), ("format", 0.5, "ok")), scored(("math", 0.0, "timeout"), num_thinking_tokens=3)
        ),
        MATH,
    )
    tally.add(
        group(
            scored(("math", 0.0, "wrong"), ("format", 0.0, "hang")),
            scored(finish="length", num_thinking_tokens=1, is_thinking_finished=False),
        ),
        MATH,
    )
    got = tally.take()
    assert got == {
        "verdicts/ok": 2,
        "verdicts/wrong": 1,
        "verdicts/timeout": 1,
        "verdicts/hang": 1,
        "verdicts/unscored": 1,
        "rewards/math": pytest.approx(1 / 3),
        "rewards/format": 0.25,
        "response/thinking_tokens": (3 + 1) / 4,
        "response/thinking_unfinished": 1 / 4,
    }
    assert all(meaning(name) for name in got)


def test_tally_is_empty_once_it_is_taken_or_cleared():
    tally = tally_of(length_penalty=1.0)
    assert tally.take() == NOTHING
    for forget in (tally.take, tally.clear):
        tally.add(group(scored(("math", 1.0, "ok"), num_tokens=5), episode(1.0, 2.0), make_rollout()), MATH)
        forget()
        assert tally.take() == NOTHING


def test_tally_turns_are_of_episodes_alone_and_those_have_nobody_else_to_judge_them():
    tally = tally_of()
    tally.add(group(episode(1.0, 0.0, 0.5), episode(-1.0, observed=3)), PLAYED)
    tally.add(group(scored(("math", 1.0, "ok"), num_tokens=6), scored(("math", 1.0, "ok"))), MATH)
    got = tally.take()
    assert got == NOTHING | {
        "verdicts/ok": 2,
        "rewards/math": 1.0,
        "turns/mean": 2.0,
        "turns/reward": 0.25,
        "response/observation_tokens": (3 + 3) / 4,
        "response/thinking_tokens": 0.0,
        "response/thinking_unfinished": 0.0,
    }
    assert all(meaning(name) for name in got)


def test_tally_tells_the_parts_of_shaping_apart_in_sampled_tokens():
    tally = tally_of(overlong_buffer_tokens=4, overlong_penalty=2.0, length_penalty=0.5)
    mask = np.arange(30) < 10  # ten sampled, twenty observed
    long = make_rollout(20, reward=1.0)
    played = make_rollout(30, loss_mask=mask, turn_rewards=np.ones(1, np.float32), reward=1.0)
    tally.add(group(long, played), MATH)
    tally.add(group(make_rollout(18, reward=0.0), make_rollout(18, reward=1.0)), MATH)
    got = tally.take()
    # 20 of 20 tokens: all of the penalty; 18: half of it, twice; 10: none
    assert got["reward/overlong_penalty"] == pytest.approx((-2 + 0 - 1 - 1) / 4)
    assert got["reward/length_penalty"] == pytest.approx((-0.25 + 0.25 + 0 + 0) / 4)
    assert "reward/overlong_penalty" not in tally_of(length_penalty=1.0).take()
    assert all(meaning(name) for name in got)
