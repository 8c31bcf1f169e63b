"""Simulated episodes against cases worked out by hand: each for itself, in lock-step, redundant, begun anew."""

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.profile import EngineProfile, LearnerProfile
from launch.tools.plan.sim.episodes import draw_latencies_s
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import EpisodeProfile, LatencyProfile, LengthProfile
from tests.launch.tools.plan.setup import by_rounds, by_window, lengths, profile_of

TURN_S = 10.0
"""100 tokens at 10 a second."""


def turns(*numbers: int) -> LengthProfile:
    return LengthProfile(kind="groups", groups=tuple((n,) for n in numbers))


def play(config: Config, *, num_updates: int = 4, engine: EngineProfile | None = None, **episodes) -> SimResult:
    fields: dict[str, Any] = dict(num_turns=turns(3), step_s=LatencyProfile(mean_s=5.0)) | episodes
    given = {} if engine is None else {"engine": engine}
    profile = profile_of(episodes=EpisodeProfile(**fields), learner=LearnerProfile(seconds_per_token=1e-12), **given)
    return simulate(config, profile, num_updates=num_updates)


def serial(**fields) -> Config:
    return by_rounds(rounds=dict(train_start="round_complete"), **fields)


def first_group_s(outcome: SimResult) -> list[float]:
    return [r["round/first_group_s"] for r in outcome.rounds]


def test_episode_takes_its_start_and_its_turns_each_with_a_step():
    outcome = play(serial(), start_s=0.5, turn_s=0.25)
    # The last of 16 starts when the others have, and after that they are far enough apart.
    assert first_group_s(outcome) == [pytest.approx(16 * 0.5 + 3 * (TURN_S + 0.25 + 5.0))]
    # The engine has nothing before the first has started and while the last one's environment has its last step.
    assert outcome.engine_utilisation == pytest.approx(1 - (0.5 + 5.25) / outcome.seconds)


@pytest.mark.parametrize("is_cached", [True, False])
def test_turn_computes_what_its_engine_does_not_have(is_cached):
    # One place in flight at a time costs what it computes: 1 prompt token, then 7 of an observation or all there is.
    engine = EngineProfile(running=(1.0,), tokens_per_s=(10.0,), max_num_seqs=64, prefill_s_per_token=1.0)
    config = by_rounds(R=1, K=2, U=1, rounds=dict(train_start="round_complete"))
    caching = dict(prefix_caching=is_cached)
    config = type(config)(**{**config.__dict__, "actor": type(config.actor)(**caching)})
    outcome = play(config, num_updates=1, engine=engine, observation_tokens=7, num_turns=turns(2))
    generated_s = 2 * 2 * 100 / 10
    # Of two samples on one engine the second finds the prompt computed.
    computed = (1 + 2 * 7) if is_cached else 2 * (1 + 108)
    assert outcome.seconds == pytest.approx(generated_s + computed + 2 * 5.0)


def test_episodes_each_for_itself_end_when_they_end_and_in_lock_step_with_the_longest():
    # Group n of 8 has n + 1 turns; in lock-step the engine and the environments take turns, 8 times.
    many: dict[str, Any] = dict(num_turns=turns(*range(1, 9)))
    assert first_group_s(play(by_rounds(), **many)) == [pytest.approx(15.0)]
    alone, together = (play(serial(), in_lock_step=lock, **many) for lock in (False, True))
    assert alone.seconds == together.seconds == pytest.approx(8 * 15.0)


@pytest.mark.parametrize("lock", [False, True])
def test_machine_of_the_environments_does_one_thing_after_the_other(lock):
    # All 16 come back at once; whoever is served last is ready last, and in lock-step all wait for it, every turn.
    outcome = play(serial(), turn_s=0.25, in_lock_step=lock)
    waits_s = 3 * 16 * 0.25 if lock else 16 * 0.25 + 2 * 0.25
    assert first_group_s(outcome) == [pytest.approx(3 * 15.0 + waits_s, abs=1e-6)]


def test_lock_step_waits_for_the_slowest_environment_of_every_turn():
    step = LatencyProfile(mean_s=5.0, deviation_s=4.0)
    config, seconds = serial(), {}
    for lock in (False, True):
        seconds[lock] = play(config, step_s=step, in_lock_step=lock).seconds
    drawn = np.array(
        [draw_latencies_s(step, 3, key=(0, 3, problem, i, 0)) for problem in range(8) for i in range(2)]
    )  # [16 episodes, 3 turns]
    assert seconds[True] == pytest.approx(3 * TURN_S + drawn.max(axis=0).sum())
    assert seconds[False] == pytest.approx(3 * TURN_S + drawn.sum(axis=1).max())


def test_losers_of_redundant_episodes_end_wherever_they_are():
    # Two of three win; the third is with its environment when they have ended, and comes no more.
    step = LatencyProfile(mean_s=5.0, deviation_s=4.0)
    config = by_rounds(R=8, U=8, rounds=dict(overprovision_samples=1.5, train_start="round_complete"))
    outcome = play(config, num_updates=1, step_s=step)
    sums = [sorted(sum(draw_latencies_s(step, 3, key=(0, 3, problem, i, 0))) for i in range(3)) for problem in range(8)]
    assert outcome.seconds == pytest.approx(3 * TURN_S + max(s[1] for s in sums))
    assert outcome.num_samples == 16 and 8 * 200 < outcome.wasted_tokens <= 8 * 300


@pytest.mark.parametrize("lock", [False, True])
def test_redundant_prompts_and_episodes_in_a_window_go_on_and_keep_the_bounds(lock):
    config = by_window(
        U=4,
        rounds=dict(overprovision_prompts=1.5, overprovision_samples=1.5),
        admission=dict(async_ratio=1.0, unit="sample"),
    )
    outcome = play(config, num_updates=20, step_s=LatencyProfile(mean_s=5.0, deviation_s=5.0), in_lock_step=lock)
    assert outcome.num_steps == 20 and outcome.num_samples == 20 * 8
    assert outcome.token_lag.max <= 1


def test_learner_waits_for_episodes_that_would_be_too_old_after_the_update():
    config = by_window(U=1, admission=dict(async_ratio=1.0, sequences=12, unit="sample"))
    outcome = play(
        config, num_updates=30, num_turns=turns(1, 1, 1, 12), step_s=LatencyProfile(mean_s=1.0, deviation_s=0.5)
    )
    assert outcome.num_samples == 60 and outcome.token_lag.max == 1
    assert outcome.wasted_tokens == 0 and not outcome.num_dropped


def test_engines_given_up_leave_their_episodes_to_the_others():
    config = by_rounds(R=8, U=8, K=4)
    profile = profile_of(
        episodes=EpisodeProfile(num_turns=turns(1, 1, 1, 1, 1, 1, 1, 6), step_s=LatencyProfile(mean_s=5.0)),
        num_engines=2,
        num_learner_chips=0,
    )
    outcome = simulate(config, profile, num_updates=2)
    assert outcome.num_samples == 64 and math.isfinite(outcome.seconds)


@settings(max_examples=20)
@given(mean=st.floats(0.1, 20), deviation=st.floats(0, 20), seed=st.integers(0, 99))
def test_latencies_are_those_of_a_normal_truncated_at_zero(mean, deviation, seed):
    profile = LatencyProfile(mean_s=mean, deviation_s=deviation)
    drawn = draw_latencies_s(profile, 1000, key=(seed, 1))
    assert drawn == draw_latencies_s(profile, 1000, key=(seed, 1)) and min(drawn) >= 0
    # The oracle: a normal's draws, those below 0 thrown away.
    kept = [x for x in np.random.default_rng(seed).normal(mean, deviation, 3000) if x >= 0]
    tolerance = 6 * statistics.stdev(kept) / math.sqrt(1000) + 1e-9
    assert abs(statistics.fmean(drawn) - statistics.fmean(kept)) <= tolerance


def test_profile_of_episodes_is_read_and_refused_by_its_fields():
    profile = profile_of(episodes=EpisodeProfile(num_turns=turns(3), step_s=LatencyProfile(mean_s=1.0)))
    assert plan_profile.from_dict(dataclasses.asdict(profile)) == profile
    raw = dataclasses.asdict(profile)
    raw["episodes"]["step_s"]["sigma"] = 1.0
    with pytest.raises(ValueError, match="has no field 'sigma'"):
        plan_profile.from_dict(raw)
    with pytest.raises(ValueError, match="deviation_s must be finite"):
        LatencyProfile(mean_s=1.0, deviation_s=-1.0)
    with pytest.raises(ValueError, match=r"episodes.turn_s must be finite"):
        EpisodeProfile(num_turns=lengths(1), step_s=LatencyProfile(mean_s=1.0), turn_s=-1.0)
