import numpy as np

from learner.metrics.sample_record import is_episode
from tests.bridge.factories import make_rollout


def test_episode_is_what_an_environment_rewarded_be_it_with_nothing():
    assert not is_episode(make_rollout(3))
    assert is_episode(make_rollout(3, turn_rewards=np.zeros(1, np.float32)))
