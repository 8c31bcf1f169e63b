"""What the bench of adapters sets, and whose memory it counts."""

import pathlib
import subprocess
import sys

import psutil
import pytest

from configs.overrides import load_preset
from tests.bench.lora.runs import CASES, RECIPE, TINY, LearnerMemory, fields_of

ASKED = {"run.num_updates": 24}
# Both hold memory of their own until their input ends.
SERVER = "import sys; held = bytearray(60_000_000); print(flush=True); sys.stdin.read()"
LEARNER = f"""
import subprocess, sys
held = bytearray(20_000_000)
server = subprocess.Popen([sys.executable, "-c", {SERVER!r}, "launch.services.snapshot_server"])
server.wait()
"""


@pytest.mark.parametrize("config", [f"{RECIPE}:rolloutpipe", TINY])
def test_full_training_has_the_recipes_learning_rate_and_adapters_ten_times_that(config):
    own = {case.name: fields_of(case, config, ASKED, pathlib.Path("snapshots"), rank=16) for case in CASES}
    assert not [name for name in own["full"] if name.startswith(("optimizer.", "lora."))]
    if config == TINY:
        assert "optimizer.learning_rate" not in own["adapter"]
        return
    wanted = 10 * load_preset(RECIPE).optimizer.learning_rate
    for name in ("merged", "adapter"):
        assert own[name]["optimizer.learning_rate"] == pytest.approx(wanted) and own[name]["lora.rank"] == 16


def test_learners_memory_is_counted_without_the_snapshot_server_below_it():
    memory = LearnerMemory()
    command = [sys.executable, "-c", LEARNER, "launch.learner"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as learner:
        assert learner.stdin is not None and learner.stdout is not None
        learner.stdout.readline()  # both hold theirs
        memory.look(psutil.Process())
        status = pathlib.Path(f"/proc/{learner.pid}/status").read_text()
        learner.stdin.close()
    (peak,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    found = memory.peaks()
    assert 20e6 < found["learner_peak_bytes"] <= peak < 60e6 < found["server_peak_bytes"]
