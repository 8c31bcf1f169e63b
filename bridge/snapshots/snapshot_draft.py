"""Draft of a weight version that is being written into a shared-memory slot."""

from collections.abc import Callable
from types import TracebackType

import numpy as np

from bridge.rollout_types import Version
from bridge.snapshots.shard_map import DTYPES, ShardMap, aligned, matrix_shape
from bridge.snapshots.shared_memory import SharedMemoryFile
from bridge.weight_types import (
    Block,
    WeightManifest,
)


class SnapshotDraft:
    """Version being written. Without `commit` or `seal`, it has no effect."""

    def __init__(
        self,
        manifest: WeightManifest,
        placement: ShardMap,
        segment: SharedMemoryFile,
        *,
        seal: Callable[[WeightManifest, np.ndarray], WeightManifest],
        publish: Callable[[WeightManifest], WeightManifest],
        end: Callable[[], None],
    ) -> None:
        """Initializes a draft for `SnapshotWriter.begin`, with the segment locked.

        Args:
          manifest: manifest of this host's unsealed part.
          placement: byte map of the part.
          segment: the locked slot.
          seal: hashes the written part.
          publish: announces a sealed version.
          end: lets the writer begin another version.
        """
        self._manifest, self._placement, self._segment = manifest, placement, segment
        self._seal, self._publish, self._end = seal, publish, end
        (piece,) = manifest.shards
        self._blocks = piece.blocks
        self._data = segment.bytes_view(piece.file.num_bytes)
        self._indices = {t.name: i for i, t in enumerate(manifest.tensors)}
        self._block_of = {i: b for b, block in enumerate(self._blocks) for i in _indices(block)}
        self._views: dict[int, np.ndarray] = {}
        self._buffers: dict[str, np.ndarray] = {}
        self._unwritten = {(b, i) for b, block in enumerate(self._blocks) for i in _indices(block)}
        self._is_open = True

    @property
    def version(self) -> Version:
        """Version being written."""
        return self._manifest.version

    def block(self, number: int) -> np.ndarray:
        """Returns the slot's memory of a block, `[num_tensors, num_rows, num_cols]`, which must be filled completely.

        Raises:
          ValueError: the draft was sealed or aborted.
        """
        self._check_open()
        if number not in self._views:
            self._views[number] = self._view(number)
            self._unwritten -= {(number, i) for i in _indices(self._blocks[number])}
        return self._views[number]

    def buffer(self, name: str) -> np.ndarray:
        """Returns the slot's memory of a tensor, which must be filled completely before `commit`.

        It contains data of an older version. Cast directly into it (`shared_memory.cast_all_into`).

        Raises:
          KeyError: the tensor was not passed to `begin`.
          ValueError: the draft was sealed or aborted, or this host writes only a part of the tensor.
        """
        self._check_open()
        if name in self._buffers:
            return self._buffers[name]
        index = self._indices[name]
        tensor, number = self._manifest.tensors[index], self._block_of.get(index)
        if number is None and tensor.num_bytes == 0:
            return np.empty(tensor.shape, DTYPES[tensor.dtype])
        if number is None or (self._blocks[number].num_rows, self._blocks[number].num_cols) != matrix_shape(
            tensor.shape
        ):
            raise ValueError(f"this host does not write all of tensor {name}; see `block`")
        whole = self._views[number] if number in self._views else self._view(number)
        self._unwritten.discard((number, index))
        buffer = whole[index - self._blocks[number].first_tensor].reshape(tensor.shape)
        self._buffers[name] = buffer
        return buffer

    def seal(self) -> WeightManifest:
        """Hashes the written data and returns this host's part of the version, which is not announced yet.

        Raises:
          ValueError: a tensor's memory was never requested, so it would contain old data.
        """
        self._check_open()
        if self._unwritten:
            missing = sorted({self._manifest.tensors[i].name for _, i in self._unwritten})
            raise ValueError(f"version {self.version}: {len(missing)} tensors not written, first {missing[0]}")
        for start, end in self._placement.gaps():  # gaps are hashed, so they must be zero
            self._data[start:end] = 0
        part = self._seal(self._manifest, self._data)
        # Unlock before the announcement: a reader of the new manifest must not find the slot locked.
        self._close()
        return part

    def commit(self) -> WeightManifest:
        """Seals and announces a version that one host wrote completely.

        Raises:
          ValueError: as `seal`.
          SnapshotError: the draft is only a part of the version.
        """
        return self._publish(self.seal())

    def abort(self) -> None:
        """Releases the slot; the announced version is unchanged."""
        if self._is_open:
            self._close()

    def __enter__(self) -> "SnapshotDraft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _view(self, number: int) -> np.ndarray:
        block, starts = self._blocks[number], self._placement.starts[number]
        dtype = DTYPES[self._manifest.tensors[block.first_tensor].dtype]
        rectangle = block.num_rows * block.num_cols * dtype.itemsize
        return np.ndarray(
            (block.num_tensors, block.num_rows, block.num_cols),
            dtype,
            self._data.data,
            offset=starts[0],
            strides=(aligned(rectangle), block.num_cols * dtype.itemsize, dtype.itemsize),
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"version {self.version} was sealed, committed or aborted already")

    def _close(self) -> None:
        self._is_open = False
        # A late write would change an announced version, so make the views read-only.
        for array in (*self._views.values(), *self._buffers.values()):
            array.flags.writeable = False
        self._end()
        self._segment.unlock()


def _indices(block: Block) -> range:
    return range(block.first_tensor, block.first_tensor + block.num_tensors)
