"""Schedules over a fleet: a real learner, a real store, and real actors of simulated engines, several of them."""

import dataclasses
from pathlib import Path

import pytest

from tests.bench.engines.measure import tickets_of
from tests.bench.engines.setups import ROLL_FLASH, ROLLOUTPIPE, ROLLPACKER, SERIAL, R, Setup
from tests.bench.rig.rig import Result, Rig

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

NUM_ENGINES, NUM_ROUNDS = 4, 3


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, model: Path):
    folder = tmp_path_factory.mktemp("fleet")
    with Rig(folder, SERIAL.config(1), model, actor_module="tests.bench.engines.fleet_process") as rig:
        yield rig


def run(rig: Rig, setup: Setup) -> Result:
    """Rounds of it, with the shortest responses that still differ."""
    lengths = dataclasses.replace(setup.lengths, max_tokens=64)
    session = setup.session(NUM_ROUNDS, num_engines=NUM_ENGINES)
    return rig.run(dataclasses.replace(session, lengths=lengths))


@pytest.mark.parametrize("setup", [ROLLPACKER, ROLL_FLASH, ROLLOUTPIPE], ids=lambda s: s.name)
def test_schedule_over_four_engines_trains_every_update_whole_and_all_of_them_serve(rig, setup: Setup):
    result = run(rig, setup)
    trained = [group for row in result.steps for group in row["groups"]]
    assert [row["step"] for row in result.steps] == list(range(1, len(result.steps) + 1))
    assert len(trained) == len(set(trained)) == NUM_ROUNDS * R
    assert all(row["sequences"] == len(row["groups"]) * setup.samples for row in result.steps)
    fewest, _ = tickets_of(result)
    assert fewest > 0
    names = {e["args"]["name"] for e in result.events if e["name"] == "process_name"}
    assert names == {"learner", *(f"actor-{i}" for i in range(NUM_ENGINES))}
    if setup is ROLL_FLASH:
        assert result.max_lag <= 2  # alpha, over all engines together
