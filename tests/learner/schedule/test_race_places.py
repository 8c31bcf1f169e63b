"""What the learner says of a race that the engines have too few places for."""

from typing import Any

import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Version
from configs.schema import Config
from configs.sections import ActorConfig, RoundsConfig
from learner.schedule.tail_batching import RaceCapacity
from tests.bridge.factories import make_report
from tests.learner.schedule.fakes import Beats

RACE = RoundsConfig(groups_per_round=32, samples_per_group=8, overprovision_prompts=1.25)
"""320 requests."""


def beat(number: int, places: int | None, *, time_s: float = 999.0, is_shutting_down: bool = False) -> Heartbeat:
    report = None if places is None else make_report(max_sequences=places, is_shutting_down=is_shutting_down)
    version = Version(incarnation=0, step=0)
    return Heartbeat(process=f"far-{number}", role="actor", pid=1, time_s=time_s, version=version, report=report)


@pytest.fixture
def store() -> Any:
    return Beats()


def places_of(store: Any, rounds: RoundsConfig = RACE) -> RaceCapacity:
    return RaceCapacity(Config(preset="test", rounds=rounds, actor=ActorConfig(max_num_seqs=64)), store)


def test_too_few_engines_are_told_once_for_each_number_of_places(store):
    races = places_of(store)
    store.beats = [beat(n, 64) for n in range(4)]
    said = races.look()
    assert said is not None and "with 4 engines the 320 requests of a round race for 256 slots" in said
    assert "this requires 5 engines of 64 sequences" in said
    assert races.look() is None
    store.beats = [beat(n, 64) for n in range(5)]
    assert races.look() is None
    store.beats = [beat(0, 64), beat(1, 200)]
    assert "with 2 engines the 320 requests of a round race for 264 slots" in (races.look() or "")


@pytest.mark.parametrize(
    "beats",
    [
        [],
        [beat(0, 64), beat(1, None)],
        [beat(0, None)],
        [beat(0, 64, is_shutting_down=True)],
        [beat(0, 64, time_s=980.0)],
        [Heartbeat(process="learner", role="learner", pid=1, time_s=999.0)],
    ],
)
def test_nothing_is_said_while_engines_start_or_none_serves(store, beats):
    store.beats = beats
    assert places_of(store).look() is None


def test_nothing_is_said_where_nothing_races(store):
    store.beats = [beat(0, 1)]
    assert places_of(store, RoundsConfig(groups_per_round=32, samples_per_group=8)).look() is None
