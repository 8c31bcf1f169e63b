"""The parameters as they leave the learner: in memory that the optimizer can't change, on their way to the host."""

import functools
from collections.abc import Iterator

import jax
import numpy as np

from bridge.adapter_names import TensorNames
from bridge.names import flatten
from bridge.snapshots.writer import SnapshotDraft
from learner.model.decoder import Params
from learner.publish.shares import Device, Share, Source, meet, relative, share_of


class Export:
    """What this host writes of one version's parameters: copies of them, until `let_go`."""

    def __init__(self, params: Params, dtype: str, names: TensorNames, *, share: Share | None = None) -> None:
        """Starts the way to the host and returns at once.

        A device casts what it gives into a buffer of its own, after whatever it was asked to do before, and the copy to
        the host starts when that is done; the next optimizer step may have the parameters.

        Args:
          params: the learner's.
          dtype: what is served, float32 or bfloat16.
          names: of the model's tensors.
          share: what this host writes; None: what its devices say.
        """
        leaves = flatten(params)
        self.share = share_of(leaves, names, jax.process_index()) if share is None else share
        self.entries = [
            (name, dtype, tuple(leaves[path].shape[len(names.stack(path)) :]))
            for path in names.paths()
            for name in names.hf_names(path)
        ]
        """Name, dtype and shape of every tensor of the model, those of other hosts too."""
        self._stacks = {path: len(names.stack(path)) for path in names.paths()}
        self._parts = _cast_parts(leaves, self.share, dtype)

    def pairs(self, draft: SnapshotDraft) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(Place in the draft, what goes there), tensor by tensor; waits for the copy, without Python's lock."""
        by_path: dict[str, list[tuple[Source, np.ndarray]]] = {}
        for source, part in zip(self.share.sources, self._parts, strict=True):
            by_path.setdefault(source.path, []).append((source, np.asarray(part)))
        for number, target in enumerate(self.share.targets):
            stack = self._stacks[target.path]
            place = draft.block(number).reshape([high - low for low, high in target.box])
            for source, part in by_path[target.path]:
                common = meet(source.box, target.box)
                if common is None:
                    continue
                to, from_ = place[relative(common, target.box)], part[relative(common, source.box)]
                for index in np.ndindex(to.shape[:stack]):
                    yield to[index], from_[index]

    def let_go(self) -> None:
        """Frees the copies."""
        self._parts = []


def _cast_parts(leaves: dict[str, jax.Array], share: Share, dtype: str) -> list[jax.Array]:
    """What each device gives, cast by it, all of one device in one call."""
    shards = {path: {shard.device: shard.data for shard in leaf.addressable_shards} for path, leaf in leaves.items()}
    parts: list[jax.Array | None] = [None] * len(share.sources)
    by_device: dict[Device, list[int]] = {}
    for number, source in enumerate(share.sources):
        by_device.setdefault(source.device, []).append(number)
    for device, numbers in by_device.items():
        given = [share.sources[number] for number in numbers]
        slices = tuple(tuple((s.start, s.stop) for s in source.in_shard) for source in given)
        cast = _cast([shards[source.path][device] for source in given], slices=slices, dtype=dtype)
        for number, part in zip(numbers, cast, strict=True):
            part.copy_to_host_async()
            parts[number] = part
    return [part for part in parts if part is not None]


@functools.partial(jax.jit, static_argnames=("slices", "dtype"))
def _cast(shards: list[jax.Array], *, slices: tuple[tuple[tuple[int, int], ...], ...], dtype: str) -> list[jax.Array]:
    # Also where nothing changes: without donation XLA writes what it returns into new memory.
    boxes = [tuple(slice(*bounds) for bounds in box) for box in slices]
    return [shard[box].astype(dtype) for shard, box in zip(shards, boxes, strict=True)]
