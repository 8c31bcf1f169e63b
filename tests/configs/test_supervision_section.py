"""Timeouts that supervision derives from its fields."""

import pytest

from configs.sections.run import SupervisionConfig


def test_timeouts_of_processes_follow_the_heartbeat():
    supervision = SupervisionConfig(heartbeat_timeout_s=8.25)
    assert (supervision.first_heartbeat_timeout_s, supervision.lock_wait_s) == (33.0, 33.0)
    assert supervision.leader_lease_s == 8.25
    assert supervision.peer_timeout_s == 17 and isinstance(supervision.peer_timeout_s, int)  # JAX takes whole seconds


@pytest.mark.parametrize("start_timeout_s", [1800.0, 100.0, 0.5])
def test_processes_of_a_learner_give_up_connecting_before_they_count_as_hung(start_timeout_s):
    connect_s = SupervisionConfig(start_timeout_s=start_timeout_s).connect_timeout_s
    assert isinstance(connect_s, int) and start_timeout_s / 6 <= connect_s < start_timeout_s / 6 + 1
