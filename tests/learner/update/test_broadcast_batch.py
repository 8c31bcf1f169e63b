"""What a process is told of a batch whose arrays come later."""

import dataclasses

import msgspec
import pytest

from configs.sections import PackingConfig
from learner.update.packed_codec import decode_batch, encode_batch
from learner.update.packing import empty_batch

PACKING = PackingConfig(rows=4, row_tokens=128)
OTHER = PackingConfig(rows=2, row_tokens=192)


def test_told_batch_of_another_shape_is_taken_where_shapes_are_chosen():
    packing = dataclasses.replace(PACKING, auto=True)
    got = decode_batch(encode_batch(empty_batch(OTHER)), packing)
    want = empty_batch(OTHER)
    assert (got.tokens.shape, got.tokens.dtype) == ((2, 192), want.tokens.dtype)
    assert got.behavior_logprobs.shape == (2, 192) and got.denominator.shape == ()


def test_told_batch_of_another_shape_is_refused_where_there_is_one():
    with pytest.raises(ValueError, match="use one config everywhere"):
        decode_batch(encode_batch(empty_batch(OTHER)), PACKING)


@pytest.mark.parametrize("broken", [lambda x: x[:-1], lambda x: [*x, "int32[2, 2]"], lambda x: ["int32[]", *x[1:]]])
def test_told_batch_with_other_arrays_is_refused_though_shapes_are_chosen(broken):
    packing = dataclasses.replace(PACKING, auto=True)
    [arrays] = msgspec.msgpack.decode(encode_batch(empty_batch(OTHER)))
    with pytest.raises(ValueError, match="use one config everywhere"):
        decode_batch(msgspec.msgpack.encode([broken(arrays)]), packing)
