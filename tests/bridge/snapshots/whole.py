"""Versions that one host writes as a whole, tensor by tensor."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.shard_map import lay_out, matrix_shape
from bridge.snapshots.snapshot_draft import SnapshotDraft
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Block, TensorEntry, WeightManifest


def full_blocks(tensors: Sequence[TensorEntry]) -> tuple[Block, ...]:
    """A block for every tensor that is not empty: the shard of a single host."""
    shapes = [matrix_shape(tensor.shape) for tensor in tensors]
    return tuple(
        Block(first_tensor=i, num_tensors=1, first_row=0, num_rows=rows, first_col=0, num_cols=cols)
        for i, (rows, cols) in enumerate(shapes)
        if rows * cols
    )


class WholeDraft:
    """A draft of all tensors, whose memory is found by name."""

    def __init__(self, writer: SnapshotWriter, version: Version, entries: Iterable[tuple[str, str, Sequence[int]]]):
        self._writer, (self._tensors, _) = writer, lay_out(entries := list(entries))
        self._blocks = full_blocks(self._tensors)
        self.draft: SnapshotDraft = writer.begin(version, entries, self._blocks)

    def buffer(self, name: str) -> np.ndarray:
        index = next(i for i, tensor in enumerate(self._tensors) if tensor.name == name)
        number = next((n for n, block in enumerate(self._blocks) if block.first_tensor == index), None)
        shape = self._tensors[index].shape
        return np.empty(shape) if number is None else self.draft.block(number)[0].reshape(shape)

    def announce(self) -> WeightManifest:
        """Seals the version and makes it the announced one."""
        manifest = self._writer.join([self.draft.seal()])
        self._writer.announce(manifest)
        return manifest

    def __enter__(self) -> "WholeDraft":
        return self

    def __exit__(self, *_: object) -> None:
        self.draft.abort()


def write_whole(
    writer: SnapshotWriter, version: Version, tensors: Mapping[str, np.ndarray], *, dtype: str
) -> WeightManifest:
    """Announces arrays, all cast to one dtype."""
    with WholeDraft(writer, version, [(name, dtype, a.shape) for name, a in tensors.items()]) as draft:
        for name, array in tensors.items():
            np.copyto(draft.buffer(name), array, casting="unsafe")
        return draft.announce()


def put(bucket: SnapshotBucket, manifest: WeightManifest) -> tuple[str, ...]:
    """Puts the announced version of a single host; returns its URL."""
    bucket.put_piece(manifest)
    return bucket.put_manifest(manifest)
