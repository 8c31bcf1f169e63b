"""A run whose processes do what a test says, for the tests of the supervisor."""

import json
import sys
from collections.abc import Sequence

import pytest

from configs.run_folder import set_up_run
from configs.schema import Config
from configs.sections import ActorConfig, PublishConfig, RunConfig, SupervisionConfig
from launch.startup.prepare_run import PreparedRun
from launch.supervision.child import Child

BOUNDS = SupervisionConfig(heartbeat_timeout_s=4, start_timeout_s=20, progress_timeout_s=4, shutdown_grace_s=20)
"""A heartbeat is sent every second."""


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """`prepared(learner=[...], actor=[...])`: a run whose processes do that, one entry a start."""

    def call(
        *, learner: list[str], actor: list[str], others: Sequence[list[str]] = (), max_restarts: int = 2
    ) -> PreparedRun:
        config = Config(
            preset="test",
            run=RunConfig(dir=str(tmp_path / "run")),
            publish=PublishConfig(snapshot_dir=str(tmp_path / "snapshots")),
            actor=ActorConfig(max_restarts=max_restarts, num_engines=1 + len(others)),
            supervision=BOUNDS,
        )
        folder = set_up_run(config)
        (folder / "learner.json").write_text(json.dumps(learner))
        for i, one in enumerate([actor, *others]):
            (folder / f"actor-{i}.json").write_text(json.dumps(one))
        return PreparedRun(config, folder, tmp_path / "model")

    monkeypatch.setattr(
        Child,
        "command",
        lambda self: [sys.executable, "-m", "tests.launch.fake_role", self.role, str(tmp_path / "run")],
    )
    return call
