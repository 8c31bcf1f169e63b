"""Draft of a weight version that is being written into a shared-memory slot."""

from collections.abc import Callable
from types import TracebackType

import numpy as np

from bridge.rollout_types import Version
from bridge.snapshots.shard_map import DTYPES, ShardMap, aligned
from bridge.snapshots.shared_memory import SharedMemoryFile
from bridge.weight_types import WeightManifest


class SnapshotDraft:
    """Part of a version that is being written. Without `seal`, it has no effect."""

    def __init__(
        self,
        manifest: WeightManifest,
        placement: ShardMap,
        segment: SharedMemoryFile,
        *,
        seal: Callable[[WeightManifest, np.ndarray], WeightManifest],
        end: Callable[[], None],
    ) -> None:
        """Takes a locked slot. `seal` hashes the written part, and `end` lets the writer begin another version."""
        self._manifest, self._placement, self._segment = manifest, placement, segment
        self._seal, self._end = seal, end
        (piece,) = manifest.shards
        self._blocks = piece.blocks
        self._data = segment.bytes_view(piece.file.num_bytes)
        self._views: dict[int, np.ndarray] = {}
        self._is_open = True

    @property
    def version(self) -> Version:
        """Version being written."""
        return self._manifest.version

    def block(self, number: int) -> np.ndarray:
        """Returns the slot's memory of a block, `[num_tensors, num_rows, num_cols]`, which must be filled completely.

        It contains data of an older version. Cast directly into it (`shared_memory.cast_all_into`). Raises ValueError
        if the draft was sealed or aborted.
        """
        self._check_open()
        if number not in self._views:
            self._views[number] = self._view(number)
        return self._views[number]

    def seal(self) -> WeightManifest:
        """Hashes the written data and returns this host's part of the version, which is not announced yet.

        Raises ValueError if a block's memory was never requested, so it would contain old data.
        """
        self._check_open()
        if missing := [b for number, b in enumerate(self._blocks) if number not in self._views]:
            first = self._manifest.tensors[missing[0].first_tensor].name
            raise ValueError(f"version {self.version}: {len(missing)} blocks not written, the first of tensor {first}")
        for start, end in self._placement.gaps():  # gaps are hashed, so they must be zero
            self._data[start:end] = 0
        part = self._seal(self._manifest, self._data)
        # Unlock before the announcement: a reader of the new manifest must not find the slot locked.
        self._close()
        return part

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
            raise ValueError(f"version {self.version} was sealed or aborted already")

    def _close(self) -> None:
        self._is_open = False
        # A late write would change an announced version, so make the views read-only.
        for array in self._views.values():
            array.flags.writeable = False
        self._end()
        self._segment.unlock()
