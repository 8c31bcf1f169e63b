"""Which runs the presets bench makes, which it takes as finished, and what it says of a part of them."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from configs import overrides, run_folder
from tests.bench import job
from tests.bench.presets import __main__ as presets
from tests.bench.presets import table
from tests.bench.presets.cases import CASES, COMPARISONS, LOSSES, PRESETS
from tests.configs.test_overrides import PRESETS as KNOWN


def result(start: float, end: float) -> dict[str, Any]:
    return {
        "held_out_reward_start": start,
        "held_out_reward_end": end,
        "held_out": [[0, start], [240, end]],
        "trained_samples": 30720,
        "lag_mean": 0.5,
        "lag_max": 1,
        "ess": 0.99,
        "mismatch_kl": 1e-3,
        "max_parity": None,
        "dropped": 0,
        "wall_s": 100.0,
    }


def all_results(**ends: float) -> dict[str, dict[str, Any]]:
    return {name: result(0.3, ends.get(name, 0.7)) for name in CASES}


def test_every_preset_that_comes_in_sizes_is_a_case():
    assert set(KNOWN) <= set(PRESETS) <= set(CASES)
    assert "tiny" not in PRESETS and not any(name.startswith("tpu") for name in PRESETS)


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_a_configuration(name):
    config_file, fields = presets.asked(CASES[name], 14)
    config = overrides.apply(overrides.load_preset(config_file), {field: str(value) for field, value in fields.items()})
    assert (config.preset, config.run.num_updates, config.run.seed) == (CASES[name].preset, 14, CASES[name].seed)


def test_losses_that_are_compared_differ_in_their_loss_alone():
    pairs = [pair for comparison in COMPARISONS for pair in comparison.pairs if pair[0] in LOSSES]
    assert len(pairs) == 3
    for case, other in pairs:
        changed = {k: v for k, v in LOSSES[case].items() if LOSSES[other].get(k) != v}
        assert changed and all(field.startswith("loss.") for field in changed)
        assert set(LOSSES[other]) <= set(LOSSES[case])


def test_rollpacker_is_held_against_serial_seed_by_seed():
    ends = {"serial": 0.70, "rollpacker": 0.70, "serial_seed_1": 0.72, "rollpacker_seed_1": 0.66}
    values = table.values_of(all_results(**ends, serial_seed_2=0.70, rollpacker_seed_2=0.67))
    assert values["rollpacker_minus_serial"] == pytest.approx((0.0 - 0.06 - 0.03) / 3)
    assert values["rollpacker_minus_serial_std"] == pytest.approx(0.03)
    assert values["rollpacker_minus_serial_pairs"] == 3
    assert table.aims_of(values)["rollpacker_minus_serial"]["met"]
    worse = table.values_of(all_results(rollpacker=0.6, rollpacker_seed_1=0.66))
    assert not table.aims_of(worse)["rollpacker_minus_serial"]["met"]


def test_a_part_of_the_runs_meets_no_aim_that_needs_the_others():
    some = {name: r for name, r in all_results().items() if name in ("serial", "rollpacker", "rollpacker_seed_1")}
    values = table.values_of(some)
    assert values["rollpacker_minus_serial_pairs"] == 1 and values["gain_serial"] == pytest.approx(0.4)
    aims = table.aims_of(values)
    assert {name: (aim["value"], aim["met"]) for name, aim in aims.items()} == {
        "min_gain": (None, False),
        "rollpacker_minus_serial": (None, False),
    }
    page = table.markdown(some)
    assert "Not run: cgp, " in page and "| rollpacker_seed_1 | 1 | 0.300 |" in page


def test_whole_page_names_every_run_and_comparison():
    page = table.markdown(all_results(window_tis=0.5))
    assert "Not run" not in page
    assert all(f"| {name} |" in page for name in (*CASES, *(c.name for c in COMPARISONS)))
    assert "| window_tis_minus_truncated_is | tis against truncated_is on the same schedule | -0.200 | - |" in page
    least = table.aims_of(table.values_of(all_results(cgp=0.5)))["min_gain"]
    assert least == {"value": pytest.approx(0.2), "aim": 0.25, "met": False}


class Runs:
    """The main job as a fake: it leaves a summary in the run's folder, and counts."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command, **_) -> Any:
        self.commands.append(command)
        (folder,) = [a.partition("=")[2] for a in command if a.startswith("--config.run.dir=")]
        run = run_folder.RunFolder(job.pathlib.Path(folder))
        run.summary.parent.mkdir(parents=True, exist_ok=True)
        run.summary.write_text(json.dumps({"steps": len(self.commands)}))
        return SimpleNamespace(returncode=0, stdout="")


@pytest.fixture
def runs(monkeypatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(job.subprocess, "run", fake)
    monkeypatch.setattr(job, "code_hash", lambda: "one")
    return fake


def test_a_finished_run_is_taken_as_it_is_and_another_one_made_anew(runs, tmp_path, monkeypatch):
    def make(seed: int) -> int:
        return job.run_job("cgp:tiny", {"run.seed": seed}, tmp_path / "cgp", reuse=True)["steps"]

    assert (make(0), make(0)) == (1, 1)
    assert make(1) == 2  # another seed is another run
    assert "--config.run.seed=1" in runs.commands[-1]
    monkeypatch.setattr(job, "code_hash", lambda: "two")
    assert make(1) == 3  # and so is one of other code
    assert job.run_job("cgp:tiny", {"run.seed": 1}, tmp_path / "cgp", reuse=False)["steps"] == 4


def test_only_some_cases_run_and_the_page_has_all_that_are_there(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(presets, "read_metrics", lambda folder: result(0.3, 0.7))
    monkeypatch.setattr(presets, "RESULTS", tmp_path / "results")
    for part in (["serial", "cgp"], ["cgp", "rollpacker"]):
        flags = {"_ONLY": part, "_UPDATES": 240, "_DIR": str(tmp_path / "runs")}
        for name, value in flags.items():
            monkeypatch.setattr(presets, name, SimpleNamespace(value=value))
        presets.main([])
    assert len(runs.commands) == 3  # cgp was finished
    values = json.loads(capsys.readouterr().out.splitlines()[-1])["values"]
    assert {k for k in values if k.startswith("gain_")} == {"gain_serial", "gain_cgp", "gain_rollpacker"}
    assert not (tmp_path / "results").exists()  # a part is no result
    for name, value in {"_ONLY": [], "_UPDATES": 240, "_DIR": str(tmp_path / "runs")}.items():
        monkeypatch.setattr(presets, name, SimpleNamespace(value=value))
    presets.main([])
    assert len(runs.commands) == len(CASES)
    stored = json.loads((tmp_path / "results" / "presets.json").read_text())
    assert {f"end_{name}" for name in CASES} <= set(stored["values"])


def test_only_a_case_that_there_is(monkeypatch):
    monkeypatch.setattr(presets, "_ONLY", SimpleNamespace(value=["serial", "window_ppo"]))
    monkeypatch.setattr(presets, "_DIR", SimpleNamespace(value="unused"))
    with pytest.raises(presets.app.UsageError, match="no case window_ppo; there are cgp, "):
        presets.main([])
