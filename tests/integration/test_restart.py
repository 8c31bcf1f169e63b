"""A learner that is killed and started again under every preset, beside a real actor: nothing is made in vain."""

import collections
import re
from pathlib import Path
from typing import Any

import pytest

from configs.presets import roll_flash
from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]
NUM_UPDATES = 32
ROUNDS = ("serial", "cgp", "rolloutpipe", "rollpacker")
WINDOWS = ("pipelinerl", "pipelinerl_ess", "roll_flash")


def dropped_groups(log: str) -> collections.Counter[str]:
    """The reasons for which the learner that was started again kept groups out."""
    (_, *again) = re.split(r"learner ready .*", log)
    return collections.Counter(re.findall(r"group dropped ticket=\S+ reason=(\S+)", "".join(again[1:])))


@pytest.mark.parametrize("preset", ROUNDS + WINDOWS)
def test_killed_learner_goes_on_and_no_group_is_made_twice_in_vain(tmp_path: Path, model: Path, preset: str):
    by_window: dict[str, Any] = {"admission__sequences": 24} if preset.startswith("pipelinerl") else {}
    per_update = 8 if preset == "rollpacker" else 2
    job = jobs.start(
        tmp_path / "run",
        model,
        config=f"{preset}:tiny",
        run__num_updates=NUM_UPDATES,
        rounds__groups_per_update=per_update,
        admission__width="auto",
        checkpoint__every_n_steps=4,
        sampling__max_response_tokens=12,
        **by_window,
    )
    try:
        job.wait_for_checkpoint(8)
        job.wait_for_step(10)
        jobs.sigkill(job.pid("learner"))
        job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=per_update, by_window=True)
    rows = job.rows("step")
    assert {r["incarnation"] for r in rows} == {0, 1}
    # What weights made that the learner went back behind has to be made again, and nothing else.
    dropped = dropped_groups((job.folder / "logs" / "learner.log").read_text())
    emitted = collections.Counter(e["args"]["ticket"] for e in job.events("reward") if e["args"]["kind"] == "train")
    print(f"{preset}: dropped after the restart {dict(dropped)}, groups emitted {emitted.total()}")
    # In a race some losers end before they hear of it, before a restart as after.
    assert set(dropped) <= ({"abandoned", "unwanted"} if preset == "rollpacker" else {"abandoned"})
    if preset in ROUNDS:
        assert dropped["abandoned"] == 0  # a round's checkpoint has the weights that the round is sampled by
    alpha = roll_flash.roll_flash("tiny").admission.async_ratio
    if preset == "roll_flash" and alpha is not None:
        assert max(r["lag/max"] for r in rows) <= alpha
