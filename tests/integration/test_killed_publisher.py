"""A learner's publisher in a process of its own, killed while a version is being written."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from configs.sections import PublishConfig
from learner.publish import publisher
from learner.publish.publisher import Publisher
from tests.bridge.snapshots.written import fetch
from tests.integration.support.processes import kill, spawn
from tests.learner.streams import MODEL, fresh_params

pytestmark = pytest.mark.integration
KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}


def publisher_of(folder: Path, *, incarnation: int) -> Publisher:
    writer = SnapshotWriter(folder, **KEYS)
    return Publisher(writer, MODEL.param_names, PublishConfig(), incarnation=incarnation, dtype="float32")


def params_of(step: int):
    return jax.tree.map(lambda x: jax.numpy.full(x.shape, step, jax.numpy.float32), fresh_params())


def publish_one_and_half_of_another(folder: Path) -> None:
    """Says when the second version lies in its slot, in part, and does no more."""
    published = publisher_of(folder, incarnation=0)
    published.publish(params_of(1), step=1)
    published.finish()

    def half(pairs: Any) -> None:
        for target, source in list(pairs)[::2]:
            np.copyto(target, source)
        print("half", flush=True)
        threading.Event().wait()

    publisher.cast_all_into = half
    published.publish(params_of(2), step=2)
    published.finish()


def test_learner_killed_in_the_middle_of_a_publish_leaves_the_version_before(tmp_path):
    folder = tmp_path / "weights"
    learner = spawn(__name__, folder, stdout=subprocess.PIPE)
    assert learner.stdout is not None
    try:
        assert learner.stdout.readline() == "half\n"
    finally:
        kill(learner)

    def served(version: Version) -> set[float]:
        manifest = latest(folder)
        assert manifest is not None and manifest.version == version
        fetch(folder, manifest, tmp_path / "copy", **KEYS)
        return {float(v) for x in map_tensors(tmp_path / "copy", manifest).values() for v in np.unique(x)}

    assert served(Version(incarnation=0, step=1)) == {1.0}
    successor = publisher_of(folder, incarnation=1)  # of the checkpoint at step 0
    successor.publish(params_of(0), step=0)
    successor.finish()
    assert served(Version(incarnation=1, step=0)) == {0.0}
    successor.close()


if __name__ == "__main__":
    publish_one_and_half_of_another(Path(sys.argv[1]))
