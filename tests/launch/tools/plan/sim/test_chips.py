"""A learner on the engines' chips: whole rounds by hand."""

import dataclasses

import pytest

from launch.tools.plan.profile import EngineProfile, LearnerProfile
from launch.tools.plan.search import Grid, search
from launch.tools.plan.sim.sim_engine import SimEngine
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.launch.tools.plan.setup import by_rounds, by_window, profile_of

ENGINE = EngineProfile(running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=64)


def shared(**fields):
    """Two engines of one chip, which train too; 10 tokens/s a sequence."""
    return profile_of(num_engines=2, num_learner_chips=0, **fields)


def round_of(config, profile):
    outcome = simulate(config, profile, num_updates=2)
    first, second = outcome.rounds
    assert first["round/rollout_to_train_end_s"] == pytest.approx(second["round/rollout_to_train_end_s"])
    return {name.removeprefix("round/"): value for name, value in first.items()}


def test_without_streaming_all_chips_train_once_the_rollout_has_ended():
    r = round_of(by_rounds(R=4, U=4, rounds=dict(train_start="round_complete")), shared())
    assert r["first_group_s"] == pytest.approx(10.0)
    assert r["rollout_to_train_end_s"] == pytest.approx(10.0 + 4 * 2.02 / 2)


def test_learner_with_chips_of_its_own_trains_beside_the_engines_and_this_one_waits():
    # Groups that end one after the other: nothing is given up by one engine, so all training follows the rollout.
    config = by_rounds(R=4, U=4)
    profile = profile_of(num_learner_chips=0, response_tokens=LengthProfile(kind="groups", groups=((9,), (500,))))
    assert round_of(config, profile)["first_group_s"] == pytest.approx(50.0)
    own = dataclasses.replace(profile, num_learner_chips=1)
    assert simulate(config, own, num_updates=1).rounds[0]["round/first_group_s"] == pytest.approx(0.9)


SHORT_AND_LONG = LengthProfile(kind="groups", groups=((100, 100), (100, 100), (300, 300), (300, 300)))


def test_streamed_gradients_take_half_of_the_engines_and_then_all():
    # At 10 s half the responses are complete. One engine is given up and trains two groups until 14.04 s; the other
    # ends at 30 s, and both train the other two.
    profile = shared(response_tokens=SHORT_AND_LONG)
    r = round_of(by_rounds(R=4, U=4), profile)
    assert r["first_group_s"] == pytest.approx(10.0)
    assert r["rollout_to_train_end_s"] == pytest.approx(30.0 + 2 * 6.02 / 2)


def test_chips_that_come_take_their_part_of_what_is_left_of_a_pass():
    # Ten times the cost: two groups take 40.4 s on one chip; 20 s of it are done at 30 s, what is left goes twice as
    # fast.
    profile = shared(response_tokens=SHORT_AND_LONG, learner=LearnerProfile(seconds_per_token=0.1))
    r = round_of(by_rounds(R=4, U=4), profile)
    assert r["rollout_to_train_end_s"] == pytest.approx(30.0 + 20.4 / 2 + 2 * 60.2 / 2)


def test_what_ran_on_the_engines_given_up_goes_on_and_pays_for_its_cache():
    engine = dataclasses.replace(ENGINE, prefill_s_per_token=0.01)
    groups = ((90, 90), (100, 100), (300, 300), (300, 300))
    profile = shared(engine=engine, response_tokens=LengthProfile(kind="groups", groups=groups))
    outcome = simulate(by_rounds(R=4, U=4), profile, num_updates=1)
    # When the first group is complete the engine given up has two or four requests of 90 tokens and a prompt's.
    assert round(outcome.recomputed_tokens) in (2 * 91, 4 * 91) and outcome.wasted_tokens == 0
    (r,) = outcome.rounds
    # While they are computed again, and while the first four prompts were, the others stand still.
    stalled_s = (4 + outcome.recomputed_tokens) * 0.01
    assert r["round/rollout_to_train_end_s"] == pytest.approx(30.0 + stalled_s + 2 * 6.02 / 2)


def test_engines_are_kept_if_the_cache_of_the_others_would_not_hold_what_runs():
    def recomputed(capacity):
        engine = dataclasses.replace(ENGINE, kv_capacity_tokens=capacity)
        groups = ((100, 100), (100, 100), (110, 110), (110, 110))
        profile = shared(engine=engine, response_tokens=LengthProfile(kind="groups", groups=groups))
        return simulate(by_rounds(R=4, U=4), profile, num_updates=4).recomputed_tokens

    # Even of half the requests, four, the peak is 404: more than 0.9 x 445, which holds the four an engine has.
    assert recomputed(445) == 0
    assert recomputed(900) > 0


def test_races_end_alike_whoever_has_the_chips():
    config = by_rounds(R=4, U=4, rounds=dict(overprovision_prompts=1.5, overprovision_samples=1.5))
    spread = LengthProfile(kind="lognormal", median=60, sigma=1.0, max_tokens=900, prompt_share=0.5)
    own = profile_of(num_engines=4, response_tokens=spread)
    outcomes = [simulate(config, dataclasses.replace(own, num_learner_chips=n), num_updates=12) for n in (0, 1)]
    assert [(o.num_steps, o.num_samples) for o in outcomes] == [(12, 12 * 8)] * 2


def test_requests_handed_over_keep_their_tokens_and_go_where_there_are_fewest():
    first, second, third = (SimEngine(ENGINE) for _ in range(3))
    for id_ in "abc":
        first.add(0.0, id_, priority=0, prompt_tokens=5, response_tokens=100)
    second.add(0.0, "d", priority=0, prompt_tokens=5, response_tokens=300)
    hosts = first.hand_over(4.0, [second, third])
    assert sorted(hosts.values()) == [0, 1, 1] and first.num_requests == 0 and first.next_event_s() == float("inf")
    ended = [f for engine in (second, third) for f in engine.advance(10.0)]
    assert sorted(f.id for f in ended) == ["a", "b", "c"]
    assert all(f.time_s == pytest.approx(10.0) and f.spans == [(0, pytest.approx(100.0))] for f in ended)
    assert first.recomputed_tokens == pytest.approx(3 * 45)


def test_shared_chips_need_rounds_and_nothing_to_split():
    with pytest.raises(ValueError, match="num_learner_chips=0 .*requires publish.when=round_end"):
        simulate(by_window(), shared(), num_updates=4)
    with pytest.raises(ValueError, match="learner has no chips of its own"):
        search(by_rounds(), shared(), Grid(num_chips=4), max_lag=None, num_updates=4)
    with pytest.raises(ValueError, match="num_learner_chips must be >= 0"):
        profile_of(num_learner_chips=-1)
