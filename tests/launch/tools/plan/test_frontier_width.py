"""The frontier's width against an engine's speed; the oracle is a table read by hand."""

import dataclasses
from typing import Any

import pytest

from configs.race_capacity import may_be_too_narrow
from configs.schema import Config
from configs.sections import ActorConfig, AdmissionConfig, RoundsConfig, RunConfig
from launch.startup.preflight import check_engines
from launch.supervision.placement import Machine
from launch.tools.plan.frontier import chosen_width, width_line, with_width
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.search import Grid
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import EpisodeProfile, LatencyProfile, LengthProfile
from tests.launch.tools.plan.setup import profile_of

# 100 tokens/s a sequence up to 24, where 2400 are 98% of the most: by groups of 8 it is reached with three.
RISING = EngineProfile(running=(1.0, 24.0, 32.0), tokens_per_s=(100.0, 2400.0, 2448.0), max_num_seqs=64)
FLAT = EngineProfile(running=(8.0,), tokens_per_s=(4000.0,), max_num_seqs=32)
FALLING = EngineProfile(running=(4.0, 16.0, 64.0), tokens_per_s=(100.0, 1000.0, 500.0), max_num_seqs=64)


def config_of(*, width: Any = "auto", policy: Any = "frontier", groups=32, max_num_seqs=32, num_engines=1):
    return Config(
        preset="test",
        run=RunConfig(num_updates=groups // 2),
        rounds=RoundsConfig(groups_per_round=groups, groups_per_update=2, samples_per_group=8),
        admission=AdmissionConfig(policy=policy, width=width),
        actor=ActorConfig(max_num_seqs=max_num_seqs, num_engines=num_engines),
    )


def hardware(engine, num_engines=1, longest=100):
    """Groups of seven responses of 100 tokens and a last one of `longest`."""
    lengths = LengthProfile(kind="groups", groups=((100,) * 7 + (longest,),))
    return dataclasses.replace(profile_of(), engine=engine, num_engines=num_engines, response_tokens=lengths)


@pytest.mark.parametrize(
    ("engine", "num_engines", "want"), [(RISING, 1, 3), (RISING, 2, 6), (FLAT, 1, 2), (FLAT, 3, 3), (FALLING, 1, 2)]
)
def test_chosen_width_reaches_97_percent_of_the_full_speed(engine, num_engines, want):
    """Where all responses are as long, F_w groups always run F_w K sequences."""
    profile = hardware(engine, num_engines)
    assert chosen_width(config_of(groups=24), profile) == want
    assert width_line(config_of(groups=24, width=want), profile) is None
    assert width_line(config_of(groups=24, policy="fifo"), profile) is None


def test_chosen_width_allows_for_the_groups_whose_last_response_is_alone():
    assert chosen_width(config_of(groups=24), hardware(RISING, longest=200)) > 3


def test_a_width_that_costs_speed_warns_and_one_that_is_chosen_is_told():
    said = width_line(config_of(groups=24, width=2), hardware(RISING))
    assert said == (
        "warning: admission.width (2) leaves the engines an estimated 65% of their full speed; set "
        "admission.width=auto, or 3"
    )  # 1600 / 2448
    assert width_line(config_of(groups=24), hardware(RISING)) == (
        "admission.width=auto: 3 groups, 98.0% of the engines' full speed"
    )
    one_sequence = dataclasses.replace(RISING, max_num_seqs=1)
    assert width_line(config_of(groups=24, width=2), hardware(one_sequence)) is None


def test_a_run_of_episodes_keeps_all_groups_in_service():
    episodes = EpisodeProfile(num_turns=LengthProfile(kind="samples", samples=(2,)), step_s=LatencyProfile(mean_s=1.0))
    profile = dataclasses.replace(hardware(RISING), episodes=episodes)
    assert chosen_width(config_of(groups=24), profile) == 24
    assert width_line(config_of(groups=24, width=2), profile) is None


def test_simulate_serves_the_chosen_width():
    profile = hardware(RISING, longest=200)
    width = chosen_width(config_of(groups=24), profile)
    assert with_width(config_of(groups=24), profile).admission_width == width
    chosen, given, wider = (
        simulate(config_of(groups=24, width=w), profile, num_updates=24) for w in ("auto", width, width + 1)
    )
    assert chosen == given != wider


@pytest.mark.parametrize(
    ("fields", "num_engines", "suggested"),
    [
        (dict(), 1, None),
        (dict(width=2), 1, 4),
        (dict(width=2), 2, 8),
        (dict(width=2, max_num_seqs=8), 1, None),
        (dict(width=4), 1, None),
        (dict(width=2, groups=2), 1, None),  # all of a round is in service
        (dict(width=2, groups=2, max_num_seqs=256), 1, None),
        (dict(policy="fifo"), 1, None),
    ],
)
def test_a_start_without_a_profile_warns_of_places_that_the_frontier_leaves_empty(fields, num_engines, suggested):
    config = config_of(num_engines=num_engines, **fields)
    said = may_be_too_narrow(config, num_engines=num_engines)
    machine = Machine(gpus=(), cores=tuple(range(8)))
    notes = [note for note in check_engines(config, ("learner", "actor"), machine) if "admission.width" in note]
    if suggested is None:
        assert said is None and not notes
    else:
        assert said is not None and said.endswith(f"Set admission.width=auto, or at most {suggested}")
        assert notes == [f"warning: {said}"]


def test_search_tries_the_width_that_a_run_chooses():
    profile = hardware(RISING)
    grid = Grid(num_chips=profile.num_chips, engines=(1,), max_num_seqs=(64,))
    assert [choice.width for choice in grid.choices(config_of(groups=24), profile)] == [2, 3, 4, 8, 16]
