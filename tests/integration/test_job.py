"""The main job, whole: supervisor, learner, a real vLLM actor, store, snapshots; and what it shows at its end."""

import json
from pathlib import Path

import pytest

from tests.integration.support import jobs
from tests.launch.tools.report.browser import PROGRAM, browser

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_ROUNDS = 3
MAX_REPORT_BYTES = 6_000_000


def test_rolloutpipe_run_trains_before_the_round_is_complete_and_leaves_everything(tmp_path: Path, model: Path):
    # Long rounds, so that a learner that gets no core for a while still begins before the round is over.
    job = jobs.start_long_rounds(tmp_path / "run", model)
    try:
        output = job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=24, per_update=2)
    # Training overlaps generation. Not in every round of a second for sure: the first compiles, and on two cores the
    # learner may get none while a checkpoint is written. (schedule/test_rollout_stream.py shows that it never waits.)
    overlaps = [jobs.first_training_and_last_rollout(job, round_) for round_ in range(NUM_ROUNDS)]
    assert any(training < rollout for training, rollout in overlaps)
    # Parity after every publish, in float32.
    probes = job.rows("probe")
    assert [p["step"] for p in probes] == [0, 8, 16, 24]
    assert max(p["parity/max_abs_dlogprob"] for p in probes) <= 1e-4
    # A round's weights are fixed: its eight updates train at lag 0 to 7.
    assert [r["lag/max"] for r in job.rows("step")] == list(range(8)) * NUM_ROUNDS
    assert all(r["actor/pause_s"] > 0 for r in job.rows("step")[8:])
    evals = job.rows("eval")
    assert [e["version"] for e in evals] == ["0:0", "0:24"] and all(e["problems"] == 24 for e in evals)
    # What people see.
    assert "held-out reward, end" in output and "waiting ratio (eq. 4)" in output
    said = [line for line in output.splitlines() if "still starting: " not in line]
    for what in ("learner: compiling accumulate", "actor-0: importing vLLM"):
        assert sum(what in line for line in said) == 1
    assert "phase: engine: building the model" in (job.folder / "logs" / "actor-0.log").read_text()
    trace = json.loads((job.folder / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert tracks == {"learner", "actor-0", "supervisor"}
    assert {"rollout", "reward", "train", "publish", "pause"} <= {e["name"] for e in trace}
    assert list((job.folder / "tensorboard").iterdir()) and (job.folder / "checkpoints" / "24").is_dir()
    assert (job.folder / "model-24" / "model.safetensors").is_file()
    check_report(job.folder, output)
    summary = json.loads((job.folder / "summary.json").read_text())
    print(f"rolloutpipe waiting ratio eq. 4: {summary['waiting_ratio_eq4']:.3f}, 5.1: {summary['waiting_ratio']:.3f}")


def check_report(folder: Path, output: str) -> None:
    """Asserts that the run's end named its report, and that a browser shows every process in each of its rounds."""
    report = folder / "report.html"
    (said,) = [line for line in output.splitlines() if line.startswith("report ")]
    assert f" {report} " in said and "not written" not in output, said
    assert report.stat().st_size <= MAX_REPORT_BYTES
    if PROGRAM is None:  # the browser's part alone needs one
        return
    with browser() as page:
        page.open(report.as_uri())
        assert page.run("document.querySelectorAll('#round-number option').length") == NUM_ROUNDS
        for i in range(NUM_ROUNDS):
            page.run(
                "(() => { const s = document.getElementById('round-number');"
                f" s.value = {i}; s.dispatchEvent(new Event('change')); }})()"
            )
            tracks = json.loads(page.run("document.getElementById('timeline').dataset.tracks"))
            assert set(tracks) == {"learner", "actor-0"}
            legend = page.run("document.getElementById('timeline-legend').textContent")
            assert "rollout" in legend and "train" in legend
        assert page.run("document.querySelectorAll('.sample').length") > 0
        assert page.problems == []
