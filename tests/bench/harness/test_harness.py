"""What a result holds and its page says, and runs that are told to end, watched and taken from their folders."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import psutil
import pytest

from configs import overrides
from tests.bench import presets, real_model
from tests.bench.harness import page, result, runs


@pytest.mark.parametrize(
    ("aim", "value", "met"),
    [
        (result.at_least(2.0), 2.0, True),
        (result.at_least(2.0), 1.9, False),
        (result.at_most(2.0), 1.9, True),
        (result.within(1.0, 2.0), 2.1, False),
        (result.at_most(2.0), None, False),
        (result.Aim(low=0.25, chosen_in_sight=True), 0.5, False),
    ],
)
def test_aim_is_met_within_its_bounds_by_what_was_measured_blindly(aim, value, met):
    assert aim.of(value)["met"] is met


def test_result_is_written_with_a_page_made_of_its_json_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(result, "results_folder", lambda: tmp_path)
    rows = [{"name": "a", "seconds": [1.0, 2.0], "dropped": {"stale": 2}}, {"name": "b", "seconds": [3.0]}]
    result.finish(
        "one",
        "A title.\n\nWhat was run.\n",
        values={"speedup": 2.5, "nothing": float("nan")},
        aims={"speedup": result.at_least(2.0, "a paper")},
        rows=rows,
        columns={"": "{name}", "s": "{seconds:.1f}", "lost": "{dropped}"},
        profile={"engine": 1},
    )
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line.keys() == {"bench", "values", "aims"} and line["values"]["nothing"] is None
    assert line["aims"]["speedup"]["met"] and line["values"].keys() >= {"speedup", "wall_s", "load_at_start"}
    whole = json.loads((tmp_path / "one.json").read_text())
    assert whole["profile"] == {"engine": 1} and whole["rows"] == rows and whole["machine"]["versions"]["python"]
    text = (tmp_path / "one.md").read_text()
    assert text == page.markdown(whole) and text.startswith("# A title\n\nWhat was run.\n")
    assert "| a | 1.5 ± 0.7 | stale 2 |\n| b | 3.0 | - |" in text
    assert "| `speedup` | 2.5 | >= 2 | yes | a paper |" in text


STORED = {p.stem: whole for p in result.RESULTS.glob("*.json") if "made" in (whole := json.loads(p.read_text()))}


@pytest.mark.parametrize("name", STORED)
def test_stored_result_has_the_form_and_its_aims_are_met_as_its_numbers_say(name):
    whole = STORED[name]
    assert whole["bench"] == name and whole["commit"] and whole.keys() >= {"machine", "values", "spread"}
    for aim in whole["aims"].values():
        bounds = (
            aim["aim"]
            if isinstance(aim["aim"], list)
            else [aim["aim"], None]
            if aim["at_least"]
            else [None, aim["aim"]]
        )
        met = result.Aim(low=bounds[0], high=bounds[1], chosen_in_sight=aim["chosen_in_sight"]).of(aim["value"])["met"]
        assert aim["met"] == met, aim
    if "doc" in whole:
        assert (result.RESULTS / f"{name}.md").read_text() == page.markdown(whole)


@pytest.mark.parametrize("name", presets.CASES)
def test_each_case_of_the_presets_is_a_configuration(name):
    case = presets.CASES[name]
    preset, fields = case.asked(14)
    config = overrides.apply(overrides.load_preset(preset), {field: str(value) for field, value in fields.items()})
    assert (config.preset, config.run.num_updates, config.run.seed) == (case.preset, 14, case.seed)


def test_losses_that_are_compared_differ_in_their_loss_alone():
    for case, other in (pair for pairs in presets.COMPARISONS.values() for pair in pairs if pair[0] in presets.LOSSES):
        ours, theirs = presets.LOSSES[case], presets.LOSSES[other]
        assert {k.partition(".")[0] for k in ours if theirs.get(k) != ours[k]} == {"loss"} and set(theirs) <= set(ours)


@pytest.mark.parametrize("preset", real_model.MINUTES)
def test_real_model_is_the_recipe_with_a_probe_of_every_publish(preset):
    fields = {name: str(value) for name, value in real_model.OVERRIDES.items()}
    config = overrides.apply(overrides.load_preset(f"{real_model.RECIPE}:{preset}"), fields)
    assert config.preset == preset and config.publish.probe_every_n_publishes == 1


JOB = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
(folder,) = [pathlib.Path(a.partition("=")[2]) for a in sys.argv if a.startswith("--config.run.dir=")]
folder.mkdir()
signal.sigwait({signal.SIGINT})
(folder / "told").write_text("")
sys.exit(130)
"""


def test_job_is_told_to_end_after_its_minutes_and_taken_from_its_folder_then(tmp_path, monkeypatch):
    """The job trains for a minute between two looks at it."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("")
    (tmp_path / "launch" / "local.py").write_text(JOB)
    folder = tmp_path / "run"

    def trained(*_: Any) -> None:
        if folder.is_dir():  # the job takes signals from here on
            with open(folder / "metrics.jsonl", "a+") as rows:
                rows.seek(0)
                number = 1 + len(rows.readlines())
                rows.write(json.dumps({"kind": "step", "step": number, "time/step_s": 60.0}) + "\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runs, "_LOOK_S", 0.01)
    monkeypatch.setattr(runs, "look_at_memory", trained)
    monkeypatch.setattr(runs, "code_hash", lambda: "")
    ran = runs.run_job("a", {}, folder, bound_s=120.0)
    assert (folder / "told").exists() and len(ran.rows) >= 3
    assert runs.run_job("a", {}, folder, bound_s=120.0) == ran
    assert len(runs.run_job("a", {}, folder, bound_s=600.0).rows) > 10


def test_memory_is_the_kernels_peak_of_the_roles_processes(tmp_path: pathlib.Path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("")
    hold = "x = bytearray(300 * 2**20)\nx[::4096] = bytes(len(x[::4096]))\ndel x\nprint('held', flush=True)\ninput()\n"
    (tmp_path / "launch" / "learner.py").write_text(hold)
    parent = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'launch.learner'])"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        peaks: dict[tuple[str, int], int] = {}
        runs.look_at_memory(psutil.Process(process.pid), peaks)
        process.communicate("\n")
    (((role, _), size),) = peaks.items()
    assert role == "learner" and 300 * 2**20 < size < 400 * 2**20
