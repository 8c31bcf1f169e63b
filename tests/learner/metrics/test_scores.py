import numpy as np

from bridge.rollout_types import RewardScore
from learner.metrics.sample_record import is_episode, mean_scores
from tests.bridge.factories import make_rollout


def test_mean_scores_are_by_verifier_over_those_that_it_gave():
    scores = [
        RewardScore(name="math", value=1.0, verdict="ok"),
        RewardScore(name="mine:style", value=-0.5, verdict="wrong"),
        RewardScore(name="math", value=0.0, verdict="wrong"),
        RewardScore(name="math", value=0.5, verdict="ok"),
    ]
    assert mean_scores(scores) == {"math": 0.5, "mine:style": -0.5}
    assert mean_scores([]) == {}


def test_episode_is_what_an_environment_rewarded_be_it_with_nothing():
    assert not is_episode(make_rollout(3))
    assert is_episode(make_rollout(3, turn_rewards=np.zeros(1, np.float32)))
