"""The tiny preset with real vLLM across three machines: actors are killed and join, and it learns as on one machine."""

import json
import subprocess
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from learner.metrics.metrics_writer import read_rows
from tests.integration.network.places import Places
from tests.integration.network.real.apart import DEADLINE_S, apart
from tests.integration.support.jobs import check_every_group_trained_once, start_command
from tests.integration.support.processes import kill, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]

NUM_UPDATES, PER_UPDATE = 160, 16
FIELDS = {
    "run.num_updates": NUM_UPDATES,
    "evaluation.num_problems": 256,
    "evaluation.every_n_steps": 40,
    "checkpoint.every_n_steps": 20,
    "actor.lease_s": 5,
    "publish.probe_every_n_publishes": 5,
}
STANDARD_ERROR = 0.03
"""Of a held-out reward of 256 sampled responses (tests/bench/results/learning.md)."""


def held_out(folder: Path) -> list[float]:
    """The held-out rewards of a run, first to last."""
    return [r["eval/reward"] for r in read_rows(RunFolder(folder).metrics) if r["kind"] == "eval"]


def test_tiny_preset_on_three_machines_learns_as_on_one_though_actors_are_killed_and_join(
    where: Places, tmp_path: Path
):
    job = start_command(tmp_path / "one", FIELDS, config="tiny", output=subprocess.DEVNULL)
    try:
        assert job.process.wait(DEADLINE_S) == 0, job.logs()
    finally:
        job.end()
    with apart(where, tmp_path, "apart", FIELDS) as run:
        for name in ("a", "b"):
            run.start_actor(name)
        run.wait_for_step(30)
        kill(run.actors.pop("a"))
        run.start_actor("c")
        run.wait_for_step(90)
        run.actors["b"].terminate()
        assert run.actors.pop("b").wait(120) == 0, run.logs()
        wait_until(lambda: run.learner.poll() is not None, "the run's end", deadline_s=DEADLINE_S)
        assert run.learner.returncode == 0, run.logs()
        check_every_group_trained_once(run.job, num_updates=NUM_UPDATES, per_update=PER_UPDATE)
    one, three = held_out(tmp_path / "one"), held_out(tmp_path / "apart")
    print(json.dumps({"one": one, "three": three}))
    assert three[-1] - three[0] > 0.2
    assert abs(one[-1] - three[-1]) < 4 * 2**0.5 * STANDARD_ERROR
