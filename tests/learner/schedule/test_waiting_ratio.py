import pytest

from learner.schedule.waiting_ratio import RoundClock


def test_finish_gives_the_papers_ratios():
    clock = RoundClock()
    clock.rollout_started(100.0)
    clock.trained(104.0, 106.0)  # first dispatch 4 s after the rollout began
    clock.trained(109.0, 110.0)
    # 10 s in all, 3 s of them compute. Eq. 4 counts the wait before the first training alone: 4 / 10.
    assert clock.finish(110.0) == pytest.approx(
        {
            "round/waiting_ratio_eq4": 0.4,
            "round/waiting_ratio": 0.7,
            "round/rollout_to_train_end_s": 10.0,
            "round/first_dispatch_s": 4.0,
        }
    )


def test_serial_round_both_ratios_agree():
    # All waiting is before the first training, as in the serial baseline of the paper's figure 1.
    clock = RoundClock()
    clock.rollout_started(0.0)
    clock.trained(6.0, 9.0)
    clock.trained(9.0, 12.0)
    metrics = clock.finish(12.0)
    assert metrics["round/waiting_ratio_eq4"] == pytest.approx(0.5)
    assert metrics["round/waiting_ratio"] == pytest.approx(0.5)


def test_rollout_started_only_the_first_call_of_a_round_counts():
    clock = RoundClock()
    for now_s in (10.0, 11.0, 15.0):
        clock.rollout_started(now_s)
    clock.trained(16.0, 20.0)
    assert clock.finish(20.0)["round/rollout_to_train_end_s"] == pytest.approx(10.0)


def test_finish_starts_over():
    clock = RoundClock()
    clock.rollout_started(0.0)
    clock.trained(1.0, 2.0)
    clock.finish(2.0)
    clock.rollout_started(50.0)
    clock.trained(51.0, 52.0)
    assert clock.finish(54.0) == pytest.approx(
        {
            "round/waiting_ratio_eq4": 0.25,
            "round/waiting_ratio": 0.75,
            "round/rollout_to_train_end_s": 4.0,
            "round/first_dispatch_s": 1.0,
        }
    )


def test_finish_of_a_round_that_never_started_is_refused():
    clock = RoundClock()
    with pytest.raises(ValueError, match="never started"):
        clock.finish(1.0)
    clock.rollout_started(0.0)
    with pytest.raises(ValueError, match="never started"):
        clock.finish(1.0)
