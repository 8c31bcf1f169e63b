"""The wall clock, which may be set, measures no length of time: it stamps what is shown or compared with a stamp."""

import ast

import pytest

from tests.integration.support.processes import REPO

STAMPS = {
    "actor/background.py": "heartbeats; the store writes its own time over it",
    "actor/serving.py": "when a group was begun; its length is monotonic",
    "actor/weights/client.py": "how old published weights are, by the publisher's stamp",
    "bridge/files.py": "how old a file is, by the file system's stamp",
    "bridge/snapshots/snapshot_writer.py": "when a version was made",
    "bridge/store/sqlite_database.py": "the store's clock, and where it continues after a reboot",
    "bridge/timeline.py": "when an event was",
    "launch/tools/evaluate/results.py": "when results were written",
    "launch/tools/evaluate/eval_runner.py": "when a group was begun; its length is monotonic",
    "launch/startup/provenance.py": "when a run was started",
    "launch/startup/locked_folders.py": "how old a folder is, by the file system's stamp",
    "launch/tools/profile_machine/store_client.py": "heartbeats; the store writes its own time over it",
    "learner/heartbeat.py": "heartbeats; the store writes its own time over it",
    "learner/metrics/metrics_writer.py": "when a row was written",
    "learner/evaluation/evaluator.py": "when an evaluation was written",
    "learner/metrics/tensorboard.py": "when a row was written; a file's name",
    "learner/metrics/trackers.py": "when a row was written",
}
"""Files that may read the wall clock, and what for."""


def reads(source: str) -> int:
    """How often a file names `time.time`."""
    return sum(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time" for node in ast.walk(ast.parse(source))
    )


@pytest.mark.heavy
def test_wall_clock_is_read_where_a_stamp_is_wanted_and_nowhere_else():
    folders = ("actor", "bridge", "configs", "launch", "learner")
    files = [f for folder in folders for f in (REPO / folder).rglob("*.py")]
    found = {str(f.relative_to(REPO)) for f in files if reads(f.read_text())}
    assert found <= set(STAMPS), "lengths of time are by time.monotonic"
