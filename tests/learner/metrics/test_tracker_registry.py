import tomllib

import pytest
from packaging.requirements import Requirement

from configs.schema import Config
from configs.sections.run import TRACKERS, RunConfig
from launch.startup import preflight
from learner.metrics import tracker_kinds
from learner.metrics.tracker_kinds import KINDS, check_installed
from learner.metrics.trackers import meanings, scalars, table
from tests.integration.support.processes import REPO, python

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = {"mlflow-skinny": "mlflow"}
"""Distributions whose module has another name."""


def test_trackers_of_the_config_are_those_that_there_are():
    assert set(TRACKERS) == {"tensorboard", *KINDS}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_extra_of_a_tracker_installs_what_it_needs(name):
    brought = [Requirement(line).name for line in EXTRAS[KINDS[name].extra]]
    assert {PACKAGES.get(b, b) for b in brought} == set(KINDS[name].packages)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_tracker_that_is_not_installed_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(tracker_kinds.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"run.trackers has {name}, and .* pip install -e .*\[{name}\]'") as e:
        check_installed(["tensorboard", name])
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="not installed"):  # before the run starts
        preflight.check_functions(Config(preset="test", run=RunConfig(trackers=name)), ("learner",))
    assert preflight.check_functions(Config(preset="test", run=RunConfig(trackers=name)), ()) == []


def test_trackers_that_nobody_knows_are_refused_and_each_counts_once():
    assert RunConfig(trackers="wandb, tensorboard,wandb").tracker_names == ("wandb", "tensorboard")
    assert RunConfig(trackers="").tracker_names == ()
    with pytest.raises(
        ValueError, match="run.trackers: expected some of tensorboard, wandb, mlflow, trackio, got 'wandbb'"
    ):
        RunConfig(trackers="wandbb")
    with pytest.raises(ValueError, match="run.project must be"):
        RunConfig(project="a/b")


def test_scalars_are_what_has_a_name_a_unit_and_a_value():
    row = {"kind": "eval", "step": 3, "incarnation": 1, "problems": 5, "eval/reward": 0.5, "loss": None, "old/name": 2}
    assert scalars(row) == {"eval/reward": 0.5}


def test_table_has_every_metric_with_what_metrics_says_of_it():
    assert set(table().splitlines()[2:]) == {f"| `{name}` | {said} |" for name, said in meanings().items()}


def test_room_imports_no_tracker_and_no_framework():
    program = (
        "import sys, learner.metrics.tracker_kinds;"
        "print([m for m in ('wandb', 'mlflow', 'trackio', 'tensorboard', 'torch', 'jax') if m in sys.modules])"
    )
    assert python("-c", program).stdout == "[]\n"
