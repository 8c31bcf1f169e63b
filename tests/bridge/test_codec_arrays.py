"""Arrays on the wire: their form and bytes, and the routing of tokens."""

import dataclasses

import msgspec
import numpy as np
import pytest

from bridge import codec
from bridge.rollout_types import Group, Rollout, Ticket
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.bridge.test_codec import change


def with_routing(group: Group, dtype: type[np.generic]) -> Group:
    def routed(rollout: Rollout) -> Rollout:
        rows = np.arange((group.prompt_tokens.size + rollout.tokens.size - 1) * 6).reshape(-1, 3, 2)
        return dataclasses.replace(rollout, routed_experts=rows.astype(dtype))

    return dataclasses.replace(group, rollouts=tuple(map(routed, group.rollouts)))


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (["<i8", bytes(16)], "dtype"),
        (["<f4", bytes(8)], "int32 vector|Expected"),
        (["|O", bytes(8)], "dtype"),
        (["<i4", bytes(7)], "not a multiple of the size"),
        (["<i4", b""], "must not be empty"),
        (["<i4", bytes(8), 1], "array"),
        (["<i4", bytes(8), [1, 2]], "int32 vector|Expected"),
        (["<i4", bytes(8), [3]], "shape"),
        (["<i4", bytes(8), [-2, -1]], ">= 0"),
        (["<i4", bytes(8), [2, 1, 1, 1]], "length"),
        (["<i4", bytes(8), [2], 1], "length"),
        ([1, 2], "str"),
        (None, "array"),
    ],
)
def test_decode_array_of_another_form_refused(array, complaint):
    data = codec.encode(make_ticket())
    with pytest.raises(ValueError, match=complaint):
        codec.decode(Ticket, change(data, lambda body: body.update(prompt_tokens=array)))


def test_decode_bool_array_with_other_bytes_refused():
    data = codec.encode(make_group(make_ticket()))

    def spoil(body):
        body["rollouts"][0]["loss_mask"][1] = b"\x01\x02\x01"

    with pytest.raises(ValueError, match="bool"):
        codec.decode(Group, change(data, spoil))


def test_decode_arrays_are_native_and_read_only():
    group = codec.decode(Group, codec.encode(make_group(make_ticket())))
    for array in (group.prompt_tokens, group.rollouts[0].loss_mask, group.rollouts[1].behavior_logprobs):
        assert array.dtype.isnative and not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routing_of_each_token_travels_in_its_shape(dtype):
    group = with_routing(make_group(make_ticket()), dtype)
    got = codec.decode(Group, codec.encode(group)).rollouts[1].routed_experts
    want = group.rollouts[1].routed_experts
    assert isinstance(got, np.ndarray) and isinstance(want, np.ndarray)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == dtype and got.shape == (4, 3, 2) and not got.flags.writeable


def test_message_of_a_model_without_routing_has_no_field_of_it():
    body = msgspec.msgpack.decode(codec.encode(make_group(make_ticket())))[2]
    assert all("routed_experts" not in rollout for rollout in body["rollouts"])
    routed = codec.encode(with_routing(make_group(make_ticket()), np.uint8))
    old = change(routed, lambda body: [rollout.pop("routed_experts") for rollout in body["rollouts"]])
    assert all(r.routed_experts is msgspec.UNSET for r in codec.decode(Group, old).rollouts)


@pytest.mark.parametrize(
    "rows", [[["|u1", bytes(18), [3, 3, 2]]], [["<i4", bytes(96), [4, 3, 2]]], [["|u1", bytes(4)]]]
)
def test_routing_that_is_not_of_the_tokens_is_refused(rows):
    data = codec.encode(make_group(make_ticket()))
    with pytest.raises(ValueError, match="routed_experts|Expected"):
        codec.decode(Group, change(data, lambda body: body["rollouts"][0].update(routed_experts=rows[0])))


def test_wire_arrays_are_little_endian_bytes():
    body = msgspec.msgpack.decode(codec.encode(make_ticket(prompt_tokens=np.array([1, -2], np.int32))))[2]
    assert body["prompt_tokens"] == ["<i4", b"\x01\x00\x00\x00\xfe\xff\xff\xff"]


def test_teachers_logprobs_are_on_the_wire_where_there_are_some():
    plain = make_group(make_ticket(), rollouts=(make_rollout(3), make_rollout(3)))
    scores = np.array([-0.5, -1.25, 0], np.float32)
    taught = dataclasses.replace(plain.rollouts[0], teacher_logprobs=scores)
    got = codec.decode(Group, codec.encode(dataclasses.replace(plain, rollouts=(taught, plain.rollouts[1]))))
    assert isinstance(got.rollouts[0].teacher_logprobs, np.ndarray)
    assert got.rollouts[0].teacher_logprobs.tolist() == scores.tolist()
    assert got.rollouts[1].teacher_logprobs is msgspec.UNSET
    for wrong in (scores[:2], scores.astype(np.float64), np.array([0, np.nan, 0], np.float32)):
        with pytest.raises(ValueError, match="teacher_logprobs"):
            dataclasses.replace(taught, teacher_logprobs=wrong)
