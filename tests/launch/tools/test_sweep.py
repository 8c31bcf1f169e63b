"""Sweep: the points of a grid or a file, their runs, and the table."""

import dataclasses
import json
import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from configs.run_folder import RunFolder, set_up_run
from launch import api, cli
from launch.tools import sweep


@pytest.fixture
def trained(monkeypatch):
    """Runs that were trained: [(folder, seed, learning rate)]. Seed 9 fails."""
    done = []

    def train(config, fields, *, run_dir):
        assert api.with_fields(config, fields).run.name == run_dir.name
        done.append((run_dir.name, config.run.seed, config.optimizer.learning_rate))
        if config.run.seed == 9:
            raise api.CommandError("no engine", 1)
        run = dataclasses.replace(config.run, name=run_dir.name, dir=str(run_dir))
        set_up_run(dataclasses.replace(config, run=run))
        summary = {
            "outcome": "done",
            "steps": config.run.num_updates,
            "training_s": 4.0,
            "held_out": [[0, 0.1], [5, 0.3]],
        }
        RunFolder(run_dir).summary.write_text(json.dumps(summary))
        return api.TrainedRun(run_dir, summary)

    monkeypatch.setattr(api, "train", train)
    return done


def run(monkeypatch, folder: pathlib.Path, overrides: dict[str, str] | None = None, **given) -> int:
    flags.FLAGS.mark_as_parsed()
    monkeypatch.setattr(cli, "_overrides", overrides or {})
    with flagsaver.flagsaver(config="tiny", sweep_dir=str(folder), **given):
        return sweep.main()


def test_every_combination_is_trained_in_its_folder(trained, monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, grid=["optimizer.learning_rate=1e-4,3e-4", "run.seed=0,1"]) == 0
    assert trained == [
        (f"learning_rate-{text}_seed-{seed}", seed, value)
        for text, value in (("1e-4", 1e-4), ("3e-4", 3e-4))
        for seed in (0, 1)
    ]
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["fields"]["run.seed"] for row in rows] == ["0", "1", "0", "1"]
    out = capsys.readouterr().out
    assert "learning_rate" in out and "0.300" in out


def test_points_of_a_file_are_trained_over_the_flags(trained, monkeypatch, tmp_path):
    (tmp_path / "points.json").write_text(
        '[{"run.seed": 2}, {"optimizer.learning_rate": 0.5, "loss.advantage": "rloo"}]'
    )
    assert run(monkeypatch, tmp_path, {"run.seed": "7"}, points=str(tmp_path / "points.json")) == 0
    assert [(seed, rate) for _, seed, rate in trained] == [(2, 1e-3), (7, 0.5)]


def test_failed_point_does_not_stop_the_others_and_only_incomplete_points_are_trained_again(
    trained, monkeypatch, tmp_path
):
    grid = ["run.seed=0,9,1"]
    assert run(monkeypatch, tmp_path, grid=grid) == 1
    assert [seed for _, seed, _ in trained] == [0, 9, 1]
    assert json.loads((tmp_path / "sweep.json").read_text())[1]["error"] == "no engine"
    assert run(monkeypatch, tmp_path, grid=grid) == 1
    assert [seed for _, seed, _ in trained[3:]] == [9]


def test_sweep_whose_points_were_all_refused_lists_them(monkeypatch, tmp_path):
    def refuse(config, fields, *, run_dir):
        raise api.CommandError("no such model", 2)

    monkeypatch.setattr(api, "train", refuse)
    assert run(monkeypatch, tmp_path / "new", grid=["run.seed=0,1"]) == 1
    assert [row["error"] for row in json.loads((tmp_path / "new" / "sweep.json").read_text())] == ["no such model"] * 2


def test_points_of_another_config_than_their_folders_are_refused(trained, monkeypatch, tmp_path, capsys):
    grid = ["run.seed=0,1"]
    assert run(monkeypatch, tmp_path, grid=grid) == 0
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, {"optimizer.learning_rate": "7e-4"}, grid=grid)
    assert "holds a run of another config: optimizer.learning_rate was" in capsys.readouterr().err
    assert len(trained) == 2


@pytest.mark.parametrize(
    ("fields", "is_complete"),
    [({}, True), ({"outcome": "interrupted"}, False), ({"steps": 399}, False)],
    ids=["done", "interrupted", "short"],
)
def test_point_is_complete_once_its_run_is_done_whatever_its_epochs(
    fields, is_complete, trained, monkeypatch, tmp_path
):
    assert run(monkeypatch, tmp_path, {"rounds.epochs": "2"}, grid=["run.seed=0"]) == 0
    file = RunFolder(tmp_path / "seed-0").summary
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert run(monkeypatch, tmp_path, {"rounds.epochs": "2"}, grid=["run.seed=0"]) == 0
    assert len(trained) == (1 if is_complete else 2)


def test_point_names_are_short_and_of_one_point_each():
    assert sweep.point_names([{"optimizer.learning_rate": "1"}, {"run.seed": "1"}]) == ["learning_rate-1", "seed-1"]
    assert sweep.point_names([{"optimizer.learning_rate": "1"}, {"critic.learning_rate": "1"}]) == [
        "optimizer.learning_rate-1",
        "critic.learning_rate-1",
    ]
    long = sweep.point_names([{"prompts.path": "x" * 200 + end} for end in "ab"])
    assert len(set(long)) == 2 and {len(name) for name in long} == {100}
    assert len(set(sweep.point_names([{"model.path": "a/b"}, {"model.path": "a-b"}]))) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "set --grid=FIELD=VALUE,... or --points=FILE"),
        ({"grid": ["run.seed"]}, "--grid=run.seed: expected FIELD=VALUE,VALUE,..."),
        ({"grid": ["run.seed=1", "run.seed=2"]}, "run.seed is set twice"),
        ({"grid": ["run.seed=1,1"]}, "two points have the same fields"),
        ({"grid": ["run.name=a,b"]}, "run.name: each point has its own below --sweep_dir"),
        ({"grid": ["run.sed=1,2"]}, "did you mean 'run.seed'"),
        ({"grid": ["rounds.groups_per_update=8,7"]}, "must divide"),
    ],
)
def test_wrong_points_are_refused_before_anything_is_trained(given, said, trained, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, **given)
    assert ended.value.code == cli.USAGE_ERROR and said in capsys.readouterr().err and trained == []


@pytest.mark.parametrize("text", ["{}", "[3]", "[{}]", "nonsense"])
def test_malformed_file_of_points_is_refused(text, trained, monkeypatch, tmp_path, capsys):
    (tmp_path / "points.json").write_text(text)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, points=str(tmp_path / "points.json"))
    assert "error: " in capsys.readouterr().err and trained == []
