"""The frontier's width against an engine's speed; the oracle is a table read by hand."""

import dataclasses
from typing import Any

import pytest

from configs.race_capacity import may_be_too_narrow
from configs.schema import Config
from configs.sections import ActorConfig, AdmissionConfig, RoundsConfig, RunConfig
from launch.startup.preflight import check_engines
from launch.supervision.placement import Machine
from launch.tools.plan.profile import EngineProfile
from launch.tools.plan.search import Grid, narrowest_width, too_narrow
from tests.launch.tools.plan.setup import profile_of

# 100 tokens/s a sequence up to 24, where 2400 are 98% of the most: by groups of 8 it is reached with three.
RISING = EngineProfile(running=(1.0, 24.0, 32.0), tokens_per_s=(100.0, 2400.0, 2448.0), max_num_seqs=64)
FLAT = EngineProfile(running=(8.0,), tokens_per_s=(4000.0,), max_num_seqs=32)
FALLING = EngineProfile(running=(4.0, 16.0, 64.0), tokens_per_s=(100.0, 1000.0, 500.0), max_num_seqs=64)


def config_of(*, width=0, policy: Any = "frontier", groups=32, max_num_seqs=32, num_engines=1):
    return Config(
        preset="test",
        run=RunConfig(num_updates=groups // 2),
        rounds=RoundsConfig(groups_per_round=groups, groups_per_update=2, samples_per_group=8),
        admission=AdmissionConfig(policy=policy, width=width),
        actor=ActorConfig(max_num_seqs=max_num_seqs, num_engines=num_engines),
    )


@pytest.mark.parametrize(
    ("engine", "num_engines", "want"), [(RISING, 1, 3), (RISING, 2, 6), (FLAT, 1, 1), (FLAT, 3, 3), (FALLING, 1, 2)]
)
def test_narrowest_width_reaches_97_percent_of_the_full_speed(engine, num_engines, want):
    assert narrowest_width(config_of(), engine, num_engines=num_engines) == want
    assert too_narrow(config_of(width=want), engine, num_engines=num_engines) is None
    assert too_narrow(config_of(policy="fifo"), engine, num_engines=num_engines) is None


def test_too_narrow_names_the_loss_and_the_field():
    said = too_narrow(config_of(), RISING)
    assert said is not None
    assert "admission.width (2) keeps 16 sequences" in said and "is 65% of" in said  # 1600 / 2448
    assert said.endswith("set admission.width=3")
    one_sequence = dataclasses.replace(RISING, max_num_seqs=1)
    assert too_narrow(config_of(), one_sequence) is None


@pytest.mark.parametrize(
    ("fields", "num_engines", "suggested"),
    [
        (dict(), 1, 4),
        (dict(), 2, 8),
        (dict(max_num_seqs=8), 1, None),
        (dict(width=4), 1, None),
        (dict(groups=2), 1, None),  # all of a round is in service
        (dict(groups=2, max_num_seqs=256), 1, None),
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
        assert said is not None and f"Set admission.width to at most {suggested};" in said
        assert notes == [f"warning: {said}"]


def test_search_tries_the_narrowest_width_that_leaves_engines_their_speed():
    profile = dataclasses.replace(profile_of(), engine=RISING)
    grid = Grid(num_chips=profile.num_chips, engines=(1,), max_num_seqs=(64,))
    assert [choice.width for choice in grid.choices(config_of(), profile)] == [2, 3, 4, 8, 16]
