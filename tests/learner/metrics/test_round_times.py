import pytest

from learner.metrics.round_times import WaitingRatios


def test_finish_gives_the_papers_ratios():
    clock = WaitingRatios()
    clock.rollout_started(100.0)
    clock.dispatched(104.0, fills_update=False)
    clock.trained(104.0, 106.0)  # the first group is trained 4 s after the rollout began,
    clock.dispatched(109.0, fills_update=True)  # the first U are there after 9 s
    clock.trained(109.0, 110.0)
    # 10 s in all, 3 s of them compute. Eq. 4 counts the wait for the first U groups (eq. 2): 9 / 10.
    assert clock.finish() == pytest.approx(
        {
            "round/waiting_ratio_eq4": 0.9,
            "round/waiting_ratio": 0.7,
            "round/wait_s": 7.0,
            "round/compute_s": 3.0,
            "round/rollout_to_train_end_s": 10.0,
            "round/first_dispatch_s": 9.0,
            "round/first_group_s": 4.0,
            "round/recovered_s": 0.0,
        }
    )


def one_round(clock, *trained, start_s=0.0):
    clock.rollout_started(start_s)
    clock.dispatched(trained[0][0], fills_update=True)
    for start_s, end_s in trained:
        clock.trained(start_s, end_s)


def test_publish_after_the_last_step_is_not_the_rounds():
    # A second of rollout and one of training; the publish, which waits for an evaluation, takes three more.
    clock = WaitingRatios()
    one_round(clock, (1.0, 2.0))
    clock.exclude(3.0)
    metrics = clock.finish()
    assert metrics["round/rollout_to_train_end_s"] == pytest.approx(2.0)
    assert metrics["round/waiting_ratio"] == pytest.approx(0.5)
    one_round(clock, (6.0, 7.0), start_s=5.0)
    assert clock.finish()["round/waiting_ratio"] == pytest.approx(0.5)  # nothing of it is left over


def test_save_between_two_rounds_and_the_first_publish_are_no_rounds():
    # Of each round 3 s are wait and 3 s compute; 3 s before each go to the first publish and to a save.
    clock = WaitingRatios()
    for start_s in (3.0, 12.0):
        clock.exclude(3.0)
        one_round(clock, (start_s + 3, start_s + 6), start_s=start_s)
        metrics = clock.finish()
        assert (metrics["round/waiting_ratio"], metrics["round/first_group_s"]) == pytest.approx((0.5, 3.0))


def test_publish_between_two_steps_is_neither_wait_nor_compute():
    clock = WaitingRatios()
    one_round(clock, (1.0, 2.0))
    clock.exclude(3.0)
    clock.trained(6.0, 7.0)  # published until 5 s, then waited for a second
    metrics = clock.finish()
    assert (metrics["round/wait_s"], metrics["round/compute_s"]) == pytest.approx((2.0, 2.0))
    assert metrics["round/waiting_ratio"] == pytest.approx(0.5)
    assert metrics["round/rollout_to_train_end_s"] == pytest.approx(7.0)


def test_rollout_started_only_the_first_call_of_a_round_counts():
    clock = WaitingRatios()
    for now_s in (10.0, 11.0, 15.0):
        clock.rollout_started(now_s)
    clock.dispatched(16.0, fills_update=True)
    clock.trained(16.0, 20.0)
    assert clock.finish()["round/rollout_to_train_end_s"] == pytest.approx(10.0)


def test_recovered_time_ends_with_the_rounds_last_group():
    clock = WaitingRatios()
    for start_s in (0.0, 50.0):
        clock.rollout_started(start_s)
        for after_s, num_groups in ((3.0, 1), (9.0, 2), (14.0, 4), (19.0, 4)):  # the last look finds no other group
            clock.arrived(start_s + after_s, num_groups)
            clock.dispatched(start_s + after_s, fills_update=num_groups >= 2)
        clock.trained(start_s + 19.0, start_s + 20.0)
        assert clock.finish()["round/recovered_s"] == 5.0


def test_finish_of_a_round_that_never_started_is_refused():
    clock = WaitingRatios()
    with pytest.raises(ValueError, match="ended without an update"):
        clock.finish()
    clock.rollout_started(0.0)
    with pytest.raises(ValueError, match="ended without an update"):
        clock.finish()


@pytest.mark.parametrize("set_back_s", [0.0, 1.0, 3600.0, 1e9])
@pytest.mark.parametrize("at", range(5))
def test_clock_that_is_set_back_leaves_no_negative_and_no_endless_time(set_back_s, at):
    clock = WaitingRatios()
    times = [t - (set_back_s if i >= at else 0.0) for i, t in enumerate([100.0, 110.0, 112.0, 117.0, 120.0, 125.0])]
    clock.rollout_started(times[0])
    clock.dispatched(times[1], fills_update=True)
    clock.trained(times[2], times[3])
    clock.trained(times[4], times[5])
    metrics = clock.finish()
    assert all(0 <= value <= 25 for value in metrics.values())
    assert metrics["round/rollout_to_train_end_s"] >= metrics["round/compute_s"] >= 5
