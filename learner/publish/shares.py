"""Which host of the learner writes which rows of the weights: known to every host from the shardings alone.

A host writes what its own devices hold, so nothing is moved between hosts for it. What several hosts hold alike (copies
along the mesh's `data` axis, norms) is split by rows among them; what has too few rows goes to the one with the least.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from bridge.adapter_names import TensorNames
from bridge.published import Block

Device = Any
"""A JAX device, whose class JAX does not show to type checkers."""
Box = tuple[tuple[int, int], ...]
"""Of each dim of a leaf, where it begins and ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What one device gives of a leaf."""

    path: str
    box: Box
    """Of the leaf."""
    device: Device
    shard: Box
    """What the device holds of the leaf; `box` lies within."""

    @property
    def in_shard(self) -> tuple[slice, ...]:
        """The box in the device's own array."""
        return relative(self.box, self.shard)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A block of the host's piece: a box of a leaf, whose stack dims are tensors of the snapshot."""

    path: str
    box: Box
    block: Block


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one host writes."""

    sources: tuple[Source, ...]
    targets: tuple[Target, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """For the snapshot's writer, in the order of `targets`."""
        return tuple(target.block for target in self.targets)


def share_of(
    leaves: Mapping[str, jax.Array],
    names: TensorNames,
    host: int,
    *,
    host_of: Callable[[Device], int] = lambda device: device.process_index,
) -> Share:
    """What a host writes of the parameters; those of all hosts together are all of them, and nothing twice.

    Args:
      leaves: path -> parameter, stacked as the learner has it.
      names: of the model's tensors.
      host: which one.
      host_of: a device's host.
    """
    num_bytes: dict[int, int] = {}
    sources: list[Source] = []
    targets: list[Target] = []
    first_tensor = 0
    for path in names.paths():
        leaf, stack = leaves[path], names.stack(path)
        owned = [
            Source(path, box, device, shard)
            for box, device, shard in _owned(leaf, len(stack), host_of, num_bytes)
            if host_of(device) == host
        ]
        sources += owned
        for box in _merged([source.box for source in owned]):
            targets += _targets(path, box, stack, first_tensor)
        first_tensor += math.prod(stack)
    targets.sort(key=lambda t: (t.block.first_tensor, t.block.first_row, t.block.first_col))
    return Share(tuple(sources), tuple(targets))


def relative(box: Box, to: Box) -> tuple[slice, ...]:
    """A box in the coordinates of one that contains it."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, to, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return None if any(low >= high for low, high in common) else common


def _owned(
    leaf: jax.Array, num_stack: int, host_of: Callable[[Device], int], num_bytes: dict[int, int]
) -> Iterable[tuple[Box, Device, Box]]:
    """For all hosts: a box of the leaf, the device that gives it, and all that this one holds."""
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
    """The box's rows in `num` parts; the box alone where it has fewer, or holds vectors."""
    dim = len(box) - 2
    if num == 1 or dim < num_stack or box[dim][1] - box[dim][0] < num:
        return [box]
    low, high = box[dim]
    cuts = [low + i * (high - low) // num for i in range(num + 1)]
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in itertools.pairwise(cuts)]


def _merged(boxes: Sequence[Box]) -> list[Box]:
    """The same in fewer boxes: those that lie side by side and are alike otherwise become one."""
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


def _targets(path: str, box: Box, stack: tuple[int, ...], first_tensor: int) -> list[Target]:
    """A box as blocks of tensors that follow on one another: a layer each, where it has a part of the experts only."""
    counted, matrix = box[: len(stack)], box[len(stack) :]
    (r0, r1), (c0, c1) = [(0, 1)] * (2 - len(matrix)) + list(matrix)
    is_whole = all(part == (0, size) for part, size in zip(counted[1:], stack[1:], strict=True))
    layers = [(i, i + 1) for i in range(*counted[0])] if counted and not is_whole else [*counted[:1]]
    targets: list[Target] = []
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
        targets.append(Target(path, (*part, *matrix), block))
    return targets
