"""Export of weights: rows that each host writes, cast on the device and copy to the host.

A host writes rows that its own devices hold, so no weights move between hosts. Rows that several hosts hold (replicas
along the mesh's `data` axis, norms) are split among these hosts. A leaf with too few rows goes to the host with the
fewest bytes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bridge.param_names import TensorNames, flatten
from bridge.snapshots.snapshot_draft import SnapshotDraft
from bridge.weight_types import Block
from learner.model.decoder import Params

Device = Any
"""A JAX device, whose class JAX does not export to type checkers."""
Box = tuple[tuple[int, int], ...]
"""(begin, end) of each dim of a leaf."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceBlock:
    """Box of a leaf that one device provides."""

    path: str
    box: Box
    device: Device
    shard: Box
    """Box of the leaf that the device holds; contains `box`."""

    @property
    def in_shard(self) -> tuple[slice, ...]:
        """The box in the device's own array."""
        return relative(self.box, self.shard)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetBlock:
    """Block of the host's piece: a box of a leaf, whose stack dims are tensors of the snapshot."""

    path: str
    box: Box
    block: Block


@dataclasses.dataclass(frozen=True, slots=True)
class ExportPlan:
    """Sources and targets of the rows that one host writes."""

    sources: tuple[SourceBlock, ...]
    targets: tuple[TargetBlock, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks for the snapshot writer, in the order of `targets`."""
        return tuple(target.block for target in self.targets)


def share_of(
    leaves: Mapping[str, jax.Array],
    names: TensorNames,
    host: int,
    *,
    host_of: Callable[[Device], int] = lambda device: device.process_index,
) -> ExportPlan:
    """Returns the rows that a host writes. The hosts together cover every parameter exactly once."""
    num_bytes: dict[int, int] = {}
    sources: list[SourceBlock] = []
    targets: list[TargetBlock] = []
    first_tensor = 0
    for path in names.paths():
        leaf, stack = leaves[path], names.stack(path)
        owned = [
            SourceBlock(path, box, device, shard)
            for box, device, shard in _owned(leaf, len(stack), host_of, num_bytes)
            if host_of(device) == host
        ]
        sources += owned
        for box in _merged([source.box for source in owned]):
            targets += _targets(path, box, stack, first_tensor)
        first_tensor += math.prod(stack)
    targets.sort(key=lambda t: (t.block.first_tensor, t.block.first_row, t.block.first_col))
    return ExportPlan(tuple(sources), tuple(targets))


def relative(box: Box, to: Box) -> tuple[slice, ...]:
    """Returns a box in the coordinates of a box that contains it."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, to, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes; None if it is empty."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(low >= high for low, high in common) else common


def _owned(
    leaf: jax.Array, num_stack: int, host_of: Callable[[Device], int], num_bytes: dict[int, int]
) -> Iterable[tuple[Box, Device, Box]]:
    """Yields, for all hosts: a box of the leaf, the device that provides it, and the box that this device holds."""
    holders: dict[Box, dict[int, Device]] = {}
    for device, index in sorted(leaf.sharding.devices_indices_map(leaf.shape).items(), key=lambda held: held[0].id):
        box = tuple(slice_.indices(size)[:2] for slice_, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(box, {}).setdefault(host_of(device), device)
    for shard, by_host in holders.items():
        hosts = sorted(by_host)
        parts = _rows(shard, num_stack, len(hosts))
        if len(parts) < len(hosts):
            hosts = [min(hosts, key=lambda host: (num_bytes.get(host, 0), host))]
        for host, box in zip(hosts, parts, strict=True):
            size = math.prod(high - low for low, high in box) * leaf.dtype.itemsize
            num_bytes[host] = num_bytes.get(host, 0) + size
            yield box, by_host[host], shard


def _rows(box: Box, num_stack: int, num: int) -> list[Box]:
    """Splits the rows of a box into `num` parts; returns the box alone if it has fewer rows, or holds vectors."""
    dim = len(box) - 2
    if num == 1 or dim < num_stack or box[dim][1] - box[dim][0] < num:
        return [box]
    low, high = box[dim]
    cuts = [low + i * (high - low) // num for i in range(num + 1)]
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in itertools.pairwise(cuts)]


def _merged(boxes: Sequence[Box]) -> list[Box]:
    """Joins boxes that are adjacent along one dim and equal in all others."""
    found, before = list(boxes), len(boxes) + 1
    while len(found) < before:
        before = len(found)
        for dim in range(len(found[0]) if found else 0):
            found = _merged_along(found, dim)
    return found


def _merged_along(boxes: Sequence[Box], dim: int) -> list[Box]:
    merged: list[Box] = []
    for box in sorted(boxes, key=lambda b: ((*b[:dim], *b[dim + 1 :]), b[dim])):
        last = merged[-1] if merged else None
        is_next = last is not None and last[dim][1] == box[dim][0]
        if last is not None and is_next and (*last[:dim], *last[dim + 1 :]) == (*box[:dim], *box[dim + 1 :]):
            merged[-1] = (*last[:dim], (last[dim][0], box[dim][1]), *last[dim + 1 :])
        else:
            merged.append(box)
    return merged


def _targets(path: str, box: Box, stack: tuple[int, ...], first_tensor: int) -> list[TargetBlock]:
    """Returns a box as blocks of consecutive tensors: one block per layer if the box has only some of the experts."""
    counted, matrix = box[: len(stack)], box[len(stack) :]
    (r0, r1), (c0, c1) = [(0, 1)] * (2 - len(matrix)) + list(matrix)
    is_whole = all(part == (0, size) for part, size in zip(counted[1:], stack[1:], strict=True))
    layers = [(i, i + 1) for i in range(*counted[0])] if counted and not is_whole else [*counted[:1]]
    targets: list[TargetBlock] = []
    for layer in layers or [()]:
        part = (layer, *counted[1:]) if layer else counted
        first = functools.reduce(lambda at, dim: at * dim[1] + dim[0][0], zip(part, stack, strict=True), 0)
        block = Block(
            first_tensor=first_tensor + first,
            num_tensors=math.prod(high - low for low, high in part),
            first_row=r0,
            num_rows=r1 - r0,
            first_col=c0,
            num_cols=c1 - c0,
        )
        targets.append(TargetBlock(path, (*part, *matrix), block))
    return targets


class Export:
    """Copies of the parameters that this host writes of one version, held until `let_go`."""

    def __init__(self, params: Params, dtype: str, names: TensorNames, *, share: ExportPlan | None = None) -> None:
        """Starts the copy to the host and returns immediately.

        Each device casts its rows into a separate buffer, after the work already queued on it; the copy to the host
        follows. The next optimizer step may reuse the parameters. Without `share` the rows are derived from this host's
        devices.
        """
        leaves = flatten(params)
        self.share = share_of(leaves, names, jax.process_index()) if share is None else share
        self.entries = [
            (name, dtype, tuple(leaves[path].shape[len(names.stack(path)) :]))
            for path in names.paths()
            for name in names.hf_names(path)
        ]
        """Name, dtype and shape of every tensor of the model, including those of other hosts."""
        self._stacks = {path: len(names.stack(path)) for path in names.paths()}
        self._parts = _cast_parts(leaves, self.share, dtype)

    def pairs(self, draft: SnapshotDraft) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (target in the draft, source array) per tensor; waits for the copy without holding the GIL."""
        by_path: dict[str, list[tuple[SourceBlock, np.ndarray]]] = {}
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
        """Releases the copies."""
        self._parts = []


def _cast_parts(leaves: dict[str, jax.Array], share: ExportPlan, dtype: str) -> list[jax.Array]:
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
    # Also if the dtype is unchanged: without donation XLA writes the results into new memory.
    boxes = [tuple(slice(*bounds) for bounds in box) for box in slices]
    return [shard[box].astype(dtype) for shard, box in zip(shards, boxes, strict=True)]
