"""Encoding of packed batches as bytes, for the learner's other processes."""

import dataclasses
import re

import jax
import msgspec

from configs.sections import PackingConfig
from learner.distributed.sharding import abstract
from learner.model.routing_replay import RoutingShape
from learner.update.packing import MicroBatch, PackedBatch, empty_batch


class _Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Dtype and shape of each array, in the order of the tree's leaves; equal in all processes."""

    arrays: tuple[str, ...]


class _Micro(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Wire form of a `MicroBatch`."""

    batch: _Batch
    ticket_ids: tuple[str, ...]
    sum_squared_lengths: float
    ends_pack: bool
    ends_update: bool
    ends_round: bool
    teachers: tuple[int, ...]


def encode_batch(batch: PackedBatch) -> bytes:
    """Encodes the shapes of a batch."""
    return msgspec.msgpack.encode(_batch_of(batch))


def decode_batch(data: bytes, packing: PackingConfig, routing: RoutingShape | None = None) -> PackedBatch:
    """Decodes a batch into `jax.ShapeDtypeStruct` arrays; their contents remain at the leader.

    Raises ValueError if the data is malformed or of another packing.
    """
    try:
        told = msgspec.msgpack.decode(data, type=_Batch)
    except msgspec.MsgspecError as e:
        raise ValueError(f"malformed batch: {e}") from None
    return _shapes(told, packing, routing)


def encode_micro(micro: MicroBatch) -> bytes:
    """Encodes the shapes of the batch and the host's fields of a micro-batch."""
    fields = {f.name: getattr(micro, f.name) for f in dataclasses.fields(micro) if f.name != "batch"}
    return msgspec.msgpack.encode(_Micro(batch=_batch_of(micro.batch), **fields))


def decode_micro(data: bytes, packing: PackingConfig, routing: RoutingShape | None = None) -> MicroBatch:
    """Decodes a micro-batch; its batch and errors are those of `decode_batch`."""
    try:
        micro = msgspec.msgpack.decode(data, type=_Micro)
    except msgspec.MsgspecError as e:
        raise ValueError(f"malformed micro-batch: {e}") from None
    fields = {name: getattr(micro, name) for name in _Micro.__struct_fields__ if name != "batch"}
    return MicroBatch(batch=_shapes(micro.batch, packing, routing), **fields)


def _batch_of(batch: PackedBatch) -> _Batch:
    return _Batch(tuple(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(batch)))


def _rows(array: str) -> tuple[int, int] | None:
    """Returns rows and tokens of the batch whose first array is described by `array`."""
    found = re.fullmatch(r"\w+\[(\d+), (\d+)\]", array)
    return None if found is None else (int(found[1]), int(found[2]))


def _shapes(told: _Batch, packing: PackingConfig, routing: RoutingShape | None) -> PackedBatch:
    shapes = jax.tree.map(abstract, empty_batch(packing, routing))
    here = _batch_of(shapes)
    if packing.auto and len(told.arrays) == len(here.arrays) and (rows := _rows(told.arrays[0])) is not None:
        return _shapes(told, dataclasses.replace(packing, auto=False, rows=rows[0], row_tokens=rows[1]), routing)
    if told != here:
        raise ValueError(
            f"packed batch: expected first array {here.arrays[:1]}, got {told.arrays[:1]}; use one config everywhere"
        )
    return shapes
