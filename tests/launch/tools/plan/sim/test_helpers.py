"""Engines' chips that help a learner with a chip of its own: rounds by hand."""

import dataclasses

import pytest

from launch.tools.plan.profile import HelperProfile
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.launch.tools.plan.setup import by_rounds, profile_of

SHORT_AND_LONG = LengthProfile(kind="groups", groups=((100, 100), (100, 100), (300, 300), (300, 300)))
"""10 tokens/s a sequence: short groups end at 10 s and take 2.02 chip-seconds each, long ones at 30 s and 6.02."""
CONFIG = by_rounds(R=4, U=4)


def rounds(helpers: HelperProfile | None, *, num_learner_chips: int = 1, num_rounds: int = 2) -> list[float]:
    """Seconds of each round until its training ends; two engines of one chip."""
    profile = profile_of(
        num_engines=2, num_learner_chips=num_learner_chips, response_tokens=SHORT_AND_LONG, helpers=helpers
    )
    outcome = simulate(CONFIG, profile, num_updates=num_rounds)
    return [r["round/rollout_to_train_end_s"] for r in outcome.rounds]


def test_learner_alone_trains_what_arrives_on_its_own_chip():
    assert rounds(None) == pytest.approx([30 + 2 * 6.02] * 2)


def test_helpers_without_cost_share_what_is_left_after_the_rollout():
    assert rounds(HelperProfile()) == pytest.approx([30 + 2 * 6.02 / 3] * 2)


def test_helpers_start_late_hand_over_before_the_step_and_wake_after_the_publish():
    # One engine's chip helps from 11 s, the other's from 31 s: until then two chips compute, and three from then on.
    costs = HelperProfile(start_s=1.0, hand_over_s=0.5, wake_s=2.0)
    first, _ = rounds(costs)
    assert first == pytest.approx(31 + (2 * 6.02 - 2 * 1.0) / 3 + 0.5)
    profile = profile_of(num_engines=2, num_learner_chips=1, response_tokens=SHORT_AND_LONG, helpers=costs)
    of_both = simulate(CONFIG, profile, num_updates=2).seconds
    assert of_both == pytest.approx(sum(rounds(costs)) + 2.0)  # the first round's wake, before the second one


def test_round_of_a_kind_whose_last_one_lost_by_helpers_is_left_alone():
    first, second = rounds(HelperProfile(hand_over_s=50.0, wake_s=50.0))
    assert first > 80 and second == pytest.approx(30 + 2 * 6.02)


def test_learner_on_the_engines_chips_pays_for_each_turn():
    free, paid = (rounds(costs, num_learner_chips=0) for costs in (None, HelperProfile(start_s=1.0, wake_s=2.0)))
    assert paid[0] > free[0]
    profile = dataclasses.replace(
        profile_of(num_engines=2, num_learner_chips=0, response_tokens=SHORT_AND_LONG),
        helpers=HelperProfile(start_s=1.0, wake_s=2.0),
    )
    assert simulate(CONFIG, profile, num_updates=2).seconds == pytest.approx(sum(paid) + 2.0)
