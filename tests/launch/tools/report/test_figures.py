"""Figures of the report: their curves, running-mean windows, ids, and the reward histogram."""

import json
from typing import Any

import numpy as np
import pytest

from launch.tools.report.figures import default_window, draw, figure_id, windows
from launch.tools.report.fixed_figures import reward_histogram
from launch.tools.report.run_data import POSITION, read_run
from launch.tools.samples.samples_view import read_samples
from tests.launch.tools.report.folder import make_folder
from tests.launch.tools.report.test_summary import group, with_samples


def curves(figure: Any) -> list[Any]:
    return [r for r in figure.model.renderers if r.tags and r.tags[0] == "curve"]


def columns(figure: Any) -> list[Any]:
    return [r.data_source.data for r in figure.model.renderers]


@pytest.mark.parametrize(
    ("steps", "choices", "default"),
    [(12, [1], 1), (40, [1, 2, 4, 10, 20], 2), (240, [1, 2, 4, 10, 20, 40, 100], 10)],
)
def test_running_mean_windows_are_whole_rounds_of_two_updates(tmp_path, steps, choices, default):
    run = read_run(make_folder(tmp_path / "run", steps=steps, groups=0))
    assert run.updates_per_round == 2
    assert windows([run]) == choices and default_window([run]) == default


def test_windows_of_no_run_are_none():
    assert windows([]) == [1] and default_window([]) == 1


def test_reward_curve_has_training_and_held_out_evaluations(tmp_path):
    drawn = draw([read_run(make_folder(tmp_path / "run", steps=24))])
    assert drawn.reward is not None and drawn.reward.id == "fig-reward"
    assert [k.label for k in drawn.reward.keys] == ["held-out problems", "training"]
    assert [c.tags[1:] for c in curves(drawn.reward)] == [
        ["eval/reward", "held-out problems", False],
        ["reward/mean", "training", True],
    ]


def test_metrics_that_depend_on_the_position_in_a_round_have_a_curve_per_position(tmp_path):
    run = read_run(make_folder(tmp_path / "run", steps=24))
    (lag,) = [one for one in draw([run]).all if one.title == "Lag"]
    assert [k.label for k in lag.keys[:2]] == ["mean, update 1 of 2", "mean, update 2 of 2"]
    first, second = (np.unique(c.data_source.data["lag/mean"]).tolist() for c in curves(lag)[:2])
    assert (first, second) == ([0.0], [1.0])  # as made: (step + 1) % 2
    assert [row["step"] for row in run.of(f"{POSITION}2/2")] == list(range(2, 25, 2))


@pytest.mark.parametrize("updates_per_round", [1, 4, 8])
def test_runs_of_different_rounds_have_one_curve_for_all_positions(tmp_path, updates_per_round):
    folders = [make_folder(tmp_path / name, name=name, steps=24) for name in ("two", "other")]
    config = json.loads((folders[1] / "config.json").read_text())
    config["rounds"] |= {"groups_per_round": 2 * updates_per_round, "groups_per_update": 2}
    (folders[1] / "config.json").write_text(json.dumps(config))
    runs = [read_run(folder) for folder in folders]
    assert [run.updates_per_round for run in runs] == [2, updates_per_round]
    (lag,) = [one for one in draw(runs).all if one.title == "Lag"]
    assert [c.tags[2] for c in curves(lag)] == ["two: mean", "two: maximum", "other: mean", "other: maximum"]


def test_learning_rate_and_mfu_are_drawn_where_recorded_only(tmp_path):
    folder = make_folder(tmp_path / "run", steps=4)
    titles = {one.title for one in draw([read_run(folder)]).all}
    assert "Gradient norm" in titles and not titles & {"Learning rate", "Model FLOPs utilization (MFU)"}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "step", "step": 5, "learning_rate": 1e-3, "mfu": 0.4}) + "\n")
    titles = {one.title for one in draw([read_run(folder)]).all}
    assert titles >= {"Learning rate", "Model FLOPs utilization (MFU)"}


def test_figure_ids_are_unique_and_have_no_markup():
    taken = set()
    ids = [figure_id(title, taken) for title in ("Lag", "lag!", "<b>Lag</b>", "数")]
    assert ids == ["fig-lag", "fig-lag-2", "fig-b-lag-b", "fig-figure"]


def test_histogram_has_the_rewards_of_the_first_and_the_last_quarter(tmp_path):
    groups = [group(step, f"p{step}", 0.0, 1.0, kind="train") for step in (1, 2)]
    groups += [group(step, f"p{step}", 1.0, 1.0, kind="train") for step in (4, 7, 8)]
    groups += [group(8, "held-out", 0.0, 0.0)]
    folder = with_samples(tmp_path / "run", groups)
    found = reward_histogram([read_run(folder)], [read_samples(folder)])
    assert found is not None and [k.label for k in found.keys] == ["first quarter", "last quarter"]
    bars = columns(found)
    assert [(b["fraction"][0], b["fraction"][-1], b["responses"].sum()) for b in bars] == [(0.5, 0.5, 4), (0.0, 1.0, 4)]
    assert bars[0]["from"][0] == 0 and bars[0]["to"][-1] == 1


@pytest.mark.parametrize("rewards", [[], [1.0, 1.0]])
def test_histogram_without_two_rewards_is_none(tmp_path, rewards):
    folder = with_samples(tmp_path / "run", [group(1, "p", *rewards, kind="train")] if rewards else [])
    assert reward_histogram([read_run(folder)], [read_samples(folder)]) is None
