"""Names of metrics as MLflow takes them, held against its rule written apart."""

import posixpath
import re

import pytest

from learner.metrics.metric_names import FAMILIES, METRICS
from learner.metrics.tracker_kinds import MLflow, metric_name


def is_taken(name: str) -> bool:
    """MLflow's rule of names (mlflow.utils.validation): characters, a path in normal form, a length."""
    normal = posixpath.normpath(name)
    is_path = normal == name and normal != "." and not normal.startswith(("..", "/"))
    return bool(re.fullmatch(r"[/\w.\- :]+", name)) and is_path and len(name) <= 250


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("eval/math/avg@8", "eval/math/avg_at_8"),
        ("eval/math/pass@4_stderr", "eval/math/pass_at_4_stderr"),
        ("rewards/my_rewards:score", "rewards/my_rewards:score"),
        ("loss", "loss"),
    ],
)
def test_name_is_ours_but_for_the_at(ours, theirs):
    assert metric_name(ours) == theirs and is_taken(theirs)


@pytest.mark.parametrize(
    "name", ["rewards/a+b", "rewards/a//b", "rewards/../b", "/a", "rewards/.", "a" * 251, "eval/\ud800/avg@8", "", "ä?"]
)
def test_name_that_mlflow_refuses_becomes_one_that_it_takes(name):
    assert not is_taken(name) and is_taken(metric_name(name))


def test_names_that_differ_stay_different():
    names = [*METRICS, *(f.replace("?*", "x").replace("*", "8") for f in FAMILIES)]
    names += ["rewards/a+b", "rewards/a-b", "rewards/a_b", "rewards/a?b", "x" * 251, "x" * 252, "x" * 250]
    assert len({metric_name(n) for n in names}) == len(set(names)) and all(is_taken(metric_name(n)) for n in names)


def test_every_metric_of_a_row_is_sent():
    sent = []

    class Client:
        def log_batch(self, run, metrics):
            sent.extend(metrics)

    one = MLflow.__new__(MLflow)
    one._client, one._metric, one._run = Client(), lambda key, value, time_ms, step: (key, value, step), "run"
    one.send([{"kind": "eval/m", "step": 4, "time_s": 1.0, "eval/m/maj@8": 0.5, "eval/m/rewards/a b?": 1.0}])
    assert [(value, step) for _, value, step in sent] == [(0.5, 4), (1.0, 4)]
    assert sent[0][0] == "eval/m/maj_at_8" and all(is_taken(key) for key, _, _ in sent)
