"""What a result holds and its page says, and runs that are told to end, watched and taken from their folders."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import psutil
import pytest

from configs import overrides
from tests.bench import all, presets, real_model
from tests.bench.harness import estimates, machine, page, result, runs, sessions
from tests.bench.harness.benches import BENCHES, Bench
from tests.bench.harness.code import code_hash
from tests.bench.harness.estimates import Estimate
from tests.bench.harness.figure import Point
from tests.bench.harness.turns import in_turns
from tests.bench.headlines import HEADLINES
from tests.bench.rig.session import Session


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


def test_interval_of_a_mean_is_students():
    numbers = [10.1, 9.7, 10.4, 9.9, 10.3]
    found = estimates.mean(numbers)
    assert found.value == pytest.approx(10.08)
    half = 2.776445 * 0.28635642 / 5**0.5  # t of 4 degrees of freedom at 97.5%, and the standard deviation
    assert (found.low, found.high) == pytest.approx((10.08 - half, 10.08 + half))
    assert math.isnan(estimates.mean([3.0]).low)


def test_highest_mean_is_one_sided_and_wider_for_more_comparisons():
    # Student's quantiles of two degrees of freedom at 0.95 and 0.99 (tables): 2.920 and 6.965.
    assert estimates.highest([1, 2, 3], num_comparisons=1) == pytest.approx(2 + 2.920 / 3**0.5, abs=1e-3)
    assert estimates.highest([1, 2, 3], num_comparisons=5) == pytest.approx(2 + 6.965 / 3**0.5, abs=1e-3)
    assert estimates.highest([1], num_comparisons=1) == math.inf


def test_ratio_is_of_pairs_so_a_drift_of_the_machine_cancels_out():
    drift = [1.0, 1.7, 0.8, 1.2]
    found = estimates.ratio([3 * d for d in drift], [2 * d for d in drift])
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    saved = estimates.less_pct([3.0, 3.3], [4.0, 4.0])
    assert saved.low < saved.value < saved.high and saved.value == pytest.approx(100 * (1 - (9.9 / 16) ** 0.5))
    with pytest.raises(ValueError):
        estimates.ratio([1.0, 2.0], [1.0])


def test_hash_of_code_changes_with_what_it_does_alone(tmp_path):
    file = tmp_path / "a.py"
    (tmp_path / "test_a.py").write_text("old")

    def hashed(text: str, path: str = "") -> str:
        file.write_text(text)
        return code_hash([path], tmp_path)

    first = hashed('"""Doc."""\ndef f(x):\n    """Adds."""\n    return x + 1  # one\n')
    (tmp_path / "test_a.py").write_text("new")
    assert hashed("def f(x):\n\n    return x + 1\n") == first
    assert hashed("def f(x):\n    return x + 2\n") != first
    with pytest.raises(FileNotFoundError):
        hashed("", "b.py")


def test_turns_alternate_their_order_and_pair_the_results(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Ran:
        name: str
        number: int
        machine_speed: float = 0.0
        span_s: float = 1.0
        tokens_per_s: float = 1.0
        max_lag: int = 0

    order: list[str] = []

    class Rig:
        def run(self, session: Session) -> Ran:
            order.append(session.config.preset)
            return Ran(session.config.preset, len(order))

    monkeypatch.setattr(machine, "speed", lambda: 7.0)
    cases = {name: Session(config=overrides.load_preset(f"{name}:tiny")) for name in ("serial", "cgp")}
    found: Any = sessions.run_in_turns(Rig(), cases, turns=3)  # pyright: ignore[reportArgumentType]
    assert order == ["serial", "cgp", "cgp", "serial", "serial", "cgp"]
    assert [r.number for r in found["serial"]] == [1, 4, 5] and [r.number for r in found["cgp"]] == [2, 3, 6]
    assert {r.machine_speed for r in found["cgp"]} == {7.0}


def test_cases_take_turns_in_alternating_order_with_the_machines_speed(monkeypatch):
    monkeypatch.setattr(machine, "speed", lambda: 7.0)
    assert list(in_turns("ab", 3)) == [
        (t, c, 7.0) for t, c in ((0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"))
    ]


def test_result_is_written_with_a_page_made_of_its_json_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(result, "results_folder", lambda: tmp_path)
    monkeypatch.setitem(BENCHES, "one", Bench("one", "", "", module="harness/page.py"))
    rows = [{"name": "a", "seconds": [1.0, 2.0], "dropped": {"stale": 2}}, {"name": "b", "seconds": [3.0]}]
    result.finish(
        "one",
        "A title.\n\nWhat was run.\n",
        values={"speedup": Estimate(2.5, 1.9, 3.1), "nothing": float("nan")},
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
    assert "| `speedup` | 2.5 (1.9 to 3.1) | >= 2 | yes, within the error | a paper |" in text
    assert whole["measures"] == ["tests/bench/harness/page.py"] and whole["code"] == code_hash(whole["measures"])


def test_page_of_results_is_made_of_the_stored_results_and_says_which_are_outdated():
    assert all.PAGE.read_text() == all.markdown(), "run python -m tests.bench.all --report"


@pytest.mark.parametrize("is_outdated", [False, True])
def test_outdated_result_claims_nothing(is_outdated, monkeypatch):
    headline = HEADLINES[0]
    bench = BENCHES[headline.bench]
    whole = {
        "values": collections.defaultdict(lambda: 1.0, {headline.key: 99.0}),
        "aims": {headline.key: result.at_least(98.0).of(99.0, (98.5, 99.5))},
        "code": "" if is_outdated else code_hash(bench.measures),
        "made": "2026-01-01T00:00",
        "commit": "abc",
    }
    monkeypatch.setattr(Bench, "stored", lambda self: whole if self == bench else None)
    row = all.markdown().partition(headline.name)[2].partition("\n")[0]
    assert ("| 99 (98.5 to 99.5) |" in row and "| yes |" in row) is not is_outdated
    wanted = {} if is_outdated else {headline.unit: [Point(headline.name, 99.0, [98.5, 99.5], 98.0, True)]}
    assert all.panels() == wanted


STORED = {name: whole for name, bench in BENCHES.items() if "made" in (whole := bench.stored() or {})}


@pytest.mark.parametrize("name", STORED)
def test_stored_result_has_the_form_and_its_aims_are_met_as_its_numbers_say(name):
    whole = STORED[name]
    assert whole["bench"] == name and whole["commit"] and whole.keys() >= {"machine", "values", "aims"}
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
    for case, other in presets.BASES.items():
        ours, theirs = presets.CASES[case].overrides, presets.CASES[other].overrides
        assert presets.CASES[case].preset == presets.CASES[other].preset
        assert {k.partition(".")[0] for k in ours if theirs.get(k) != ours[k]} == {"loss"} and set(theirs) <= set(ours)


def test_preset_is_below_serial_by_what_the_error_does_not_explain():
    def row(late: float, start: float = 0.3) -> dict[str, float]:
        return {"late": late, "start": start}

    rows = {f"serial_{s}": row(0.8) for s in presets.SEEDS}
    near = [0.7, 0.9, 0.75, 0.85, 0.78]
    far = [0.6, 0.61, 0.59, 0.6, 0.6]
    rows |= {f"cgp_{s}": row(late) for s, late in zip(presets.SEEDS, near, strict=True)}
    assert presets.values_of(rows)[0]["beyond_error"] == 0.0
    rows |= {f"rollpacker_{s}": row(late) for s, late in zip(presets.SEEDS, far, strict=True)}
    values, compared = presets.values_of(rows)
    assert 0.195 < values["beyond_standard_error"] < 0.2 and 0.18 < values["beyond_error"] < 0.19
    assert values["rollpacker_minus_serial"].value == pytest.approx(-0.2)
    assert values["min_gain"] == pytest.approx(0.3) and len(compared) == 2


def test_late_reward_is_of_the_last_third_of_the_updates():
    held_out = [(0, 0.1), (40, 0.2), (80, 0.3), (120, 0.4), (160, 0.5), (200, 0.6), (240, 0.9)]
    assert presets.late_reward({"held_out": held_out, "num_steps": 240}) == pytest.approx(2.0 / 3)


@pytest.mark.parametrize("preset", real_model.PRESETS)
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
    monkeypatch.setattr(runs, "code_hash", lambda paths: "")
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
