"""Small versions of weights, written and looked at."""

import contextlib
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bridge.rollout_types import Version
from bridge.snapshots.shard_map import ShardMap
from bridge.snapshots.snapshot_format import is_chunk
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
from bridge.weight_types import FileEntry, TensorEntry, WeightManifest
from tests.bridge.snapshots.whole import full_blocks, write_whole

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}


def at(step: int, incarnation: int = 0) -> Version:
    return Version(incarnation=incarnation, step=step)


def weights(step: int, num_values: int = 100) -> dict[str, np.ndarray]:
    return {
        "norm": np.full(3, step, np.float32),
        "layer.0": np.arange(num_values, dtype=np.float32) + step,
        "scalar": np.array(step, np.float32),
    }


def publish(writer: SnapshotWriter, step: int, **sizes) -> WeightManifest:
    return write_whole(writer, at(step), weights(step, **sizes), dtype="float32")


def assert_holds(path: Path, manifest: WeightManifest, want: dict[str, np.ndarray]) -> None:
    got = map_tensors(path, manifest)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def has_chunk(data: np.ndarray, file: FileEntry, index: int) -> bool:
    """Whether a chunk's place in a file's bytes holds that chunk."""
    start, end = file.chunk(index)
    return is_chunk(data[start:end], file, index)


def flat(num_bytes: int) -> ShardMap:
    """Of a piece that is the whole file, of so many bytes or a few more."""
    size = -(-num_bytes // 4)
    tensor = TensorEntry(name="w", dtype="float32", shape=(size,), offset_bytes=0, num_bytes=4 * size)
    return ShardMap([tensor], full_blocks([tensor]))


def slot_path(folder: Path, manifest: WeightManifest) -> Path:
    return folder / manifest.shards[0].file.name


def fetch(folder: str | os.PathLike[str], manifest: WeightManifest, into: str | os.PathLike[str], **options) -> None:
    """`VerifiedCopy.fetch` for once; the copy stays."""
    with contextlib.closing(VerifiedCopy(folder, into, **options)) as mirror:
        mirror.fetch(manifest)
