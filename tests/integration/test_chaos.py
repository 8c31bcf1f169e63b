"""Every process of a run stopped and killed in random order: it ends by itself, and every group is trained once."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs import overrides
from configs.run_folder import snapshot_folder
from launch.supervision import process_tree
from launch.supervision.backend import run_tag
from tests.integration.support.chaos import Chaos, draw_faults
from tests.integration.support.jobs import Job, check_every_group_trained_once

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]
NUM_FAULTS = 20
NUM_UPDATES = 1000
"""More than are made before the last fault."""
MAX_IDLE_S = 60.0
DEADLINE_S = 3600.0


@pytest.mark.parametrize(("preset", "seed"), [("rolloutpipe", 1), ("pipelinerl", 2)])
def test_run_under_twenty_stops_and_kills_ends_by_itself_and_trains_every_group_once(
    tmp_path: Path, preset: str, seed: int
):
    folder = tmp_path / "run"
    fields = {
        "run.num_updates": NUM_UPDATES,
        "checkpoint.every_n_steps": 12,
        "evaluation.num_problems": 64,
    }
    chaos = Chaos(folder, fields, config=f"{preset}:tiny")
    report = chaos.run(draw_faults(seed, NUM_FAULTS), deadline_s=DEADLINE_S)
    print(json.dumps({"preset": preset, "seed": seed} | dataclasses.asdict(report)))

    assert sum(report.injected.values()) == NUM_FAULTS
    assert report.num_commands == 1 + report.num_supervisors_killed
    config = overrides.from_dict(json.loads((folder / "config.json").read_text()))
    check_every_group_trained_once(
        Job(folder, chaos.job.process),
        num_updates=NUM_UPDATES,
        per_update=config.rounds.groups_per_update,
        by_window=config.publish.when == "every",
    )
    # Nothing is left: neither a process nor shared memory.
    assert process_tree.kill_leftovers(lambda mark: mark.startswith(run_tag(folder))) == []
    snapshots = snapshot_folder(config)
    assert list(snapshots.parent.glob(f"{snapshots.name}*")) == []
    assert report.longest_idle_s < MAX_IDLE_S
