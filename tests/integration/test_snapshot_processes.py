"""Snapshots while their writer is killed in the middle, again and again."""

import contextlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SupersededError, latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
from bridge.weight_types import WeightManifest
from tests.bridge.snapshots.whole import WholeDraft
from tests.integration.support.processes import kill, spawn

pytestmark = pytest.mark.integration

KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}
NUM_LIVES = 15
ENTRIES = [(f"w{i}", "float32", (64, 256)) for i in range(8)]


def publish_forever(folder: Path) -> None:
    """Publishes versions whose every value is the version's step, saying each thing it does."""
    writer = SnapshotWriter(folder, **KEYS)
    announced = latest(folder)
    step = 0 if announced is None else announced.version.step + 1
    while True:
        draft = WholeDraft(writer, Version(incarnation=0, step=step), ENTRIES)
        for name, _, _ in ENTRIES:
            draft.buffer(name)[:] = step
            print("wrote", name, flush=True)
        draft.announce()
        print("committed", step, flush=True)
        step += 1


def fetch_latest(mirror: VerifiedCopy, folder: Path) -> WeightManifest | None:
    while True:
        manifest = latest(folder)
        if manifest is None:
            return None
        try:
            mirror.fetch(manifest)
        except SupersededError:
            continue
        return manifest


def test_killed_writer_never_shows_a_half_written_version(tmp_path):
    folder, local = tmp_path / "weights", tmp_path / "local"
    chance = random.Random(0)
    last_seen, num_checked = -1, 0
    with contextlib.closing(VerifiedCopy(folder, local, **KEYS)) as mirror:

        def check() -> None:
            nonlocal last_seen, num_checked
            manifest = fetch_latest(mirror, folder)
            if manifest is None:
                return
            step = manifest.version.step
            assert step >= last_seen
            tensors = map_tensors(local, manifest)
            assert tensors.keys() == {name for name, _, _ in ENTRIES}
            for tensor in tensors.values():
                np.testing.assert_array_equal(tensor, np.full((64, 256), step, np.float32))
            last_seen, num_checked = step, num_checked + 1

        for _ in range(NUM_LIVES):
            writer = spawn(__name__, folder, stdout=subprocess.PIPE)
            assert writer.stdout is not None
            try:
                for _ in range(chance.randrange(1, 40)):
                    assert writer.stdout.readline()
                    check()  # while the writer goes on
            finally:
                kill(writer)
            before = last_seen
            check()  # what the dead writer announced last stays readable
            assert last_seen >= before
    assert num_checked > NUM_LIVES and last_seen > NUM_LIVES


if __name__ == "__main__":
    publish_forever(Path(sys.argv[1]))
