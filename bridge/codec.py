"""Wire format: msgpack in, validated types out; never pickle.

A message is `[format, type name, body]`. The body is a map with exactly the type's fields, no more
and no fewer, and an array in it is `[dtype, raw little-endian bytes]`. Whatever is wrong with a
message, `decode` says so with a `ValueError`; what it returns has passed its type's `__post_init__`.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from bridge.checks import is_array
from bridge.published import Announcement, RunCard, WeightManifest
from bridge.types import MAX_REWARD_PARTS, MAX_SAMPLES, Group, Heartbeat, RewardScore, Rollout, Task, Ticket

FORMATS = {Ticket: 3, Group: 5, WeightManifest: 5, Heartbeat: 4, Announcement: 3, RunCard: 1}
"""What travels, and the version of its form.

A type's number goes up with every change of its fields. What a store or a checkpoint then holds of that type is read by
`_OLDER`, or can't be read any more: then `sqlite_schema.SCHEMA_VERSION` goes up too, and a migration makes those rows
anew or drops them.
"""

MAX_BYTES = 64 * 2**20
"""Default limit on one message."""

_MAX_ERROR_CHARS = 500
_DTYPES = {"<i4": np.dtype(np.int32), "|b1": np.dtype(np.bool_), "<f4": np.dtype(np.float32)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Readers keep integers in 64 signed bits (SQLite's, numpy's), msgpack alone would allow 2**64 - 1.
_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

Message = Ticket | Group | WeightManifest | Heartbeat | Announcement | RunCard
"""Whatever travels."""

T = TypeVar("T", bound=Message)


class OtherFormatError(ValueError):
    """A message of another build: its type has another format version here."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    type: str
    body: msgspec.Raw


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    data: bytes


def encode(obj: Message, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Packs a wire type.

    The bytes are decoded once before they leave, so a value that its reader would refuse (a numpy
    integer too large, an array changed after it was checked) fails here, at its maker.

    Raises:
      ValueError: the value is of no wire type, too large, or violates its type.
    """
    if type(obj) not in FORMATS:
        raise ValueError(f"no wire type: {type(obj).__name__}; wanted one of {_names()}")
    try:
        body = msgspec.Raw(msgspec.msgpack.encode(obj, enc_hook=_pack))
    except (TypeError, OverflowError) as e:
        raise ValueError(f"a {type(obj).__name__} cannot be encoded: {e}") from e
    data = msgspec.msgpack.encode(_Message(FORMATS[type(obj)], type(obj).__name__, body))
    decode(type(obj), data, max_bytes=max_bytes)
    return data


def decode(type_: type[T], data: bytes | memoryview, *, max_bytes: int = MAX_BYTES) -> T:
    """Unpacks a message of the given type; its arrays are read-only.

    Raises:
      OtherFormatError: another format version.
      ValueError: larger than `max_bytes`, another type, truncated or trailing bytes, an unknown or
        missing field, or values the type refuses.
    """
    if type_ not in FORMATS:
        raise ValueError(f"no wire type: {type_!r}; wanted one of {_names()}")
    if len(data) > max_bytes:
        raise ValueError(f"message has {len(data)} bytes, the limit is {max_bytes}")
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        if message.type != type_.__name__:
            raise ValueError(f"got a {_brief(repr(message.type))}, wanted a {type_.__name__}")
        body: bytes | msgspec.Raw = message.body
        if message.format != FORMATS[type_]:
            older = _OLDER.get((type_, message.format))
            if older is None:
                raise OtherFormatError(
                    f"{message.type}: wire format {message.format}, this build reads {FORMATS[type_]}: update the "
                    "older one"
                )
            body = older(body)
        fields = msgspec.msgpack.decode(body, type=_strict(type_))
        return msgspec.convert(fields, type_, from_attributes=True, dec_hook=_unpack)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as e:
        raise ValueError(f"malformed {type_.__name__} message: {_brief(str(e))}") from None


def _older_struct(type_: type, **other: Any) -> type[msgspec.Struct]:
    """A struct with the dataclass's fields, each as it was written, but for `other`: its own, or None for one less.

    Of a fixed shape, as today's is: what is not bounded can't become large.
    """
    fields = {f.name: msgspec.Raw for f in dataclasses.fields(type_)} | other
    given = [(name, kind) for name, kind in fields.items() if kind is not None]
    return msgspec.defstruct(f"{type_.__name__}2", given, forbid_unknown_fields=True)


_TASK_2 = _older_struct(Task, rewards=None, environment=None, verifier=msgspec.Raw)
_TICKET_2 = _older_struct(Ticket, task=_TASK_2)
_NO_THINKING: dict[str, Any] = {"num_thinking_tokens": None, "is_thinking_finished": None}
_ROLLOUT_2 = _older_struct(Rollout, scores=None, turn_rewards=None, **_NO_THINKING)
_GROUP_2 = _older_struct(
    Group, older_versions=None, rollouts=Annotated[list[_ROLLOUT_2], msgspec.Meta(max_length=MAX_SAMPLES)]
)
_SCORE_3 = _older_struct(RewardScore, answer=None)
_ROLLOUT_3 = _older_struct(
    Rollout, scores=Annotated[list[_SCORE_3], msgspec.Meta(max_length=MAX_REWARD_PARTS)], **_NO_THINKING
)
_GROUP_3 = _older_struct(
    Group, older_versions=None, rollouts=Annotated[list[_ROLLOUT_3], msgspec.Meta(max_length=MAX_SAMPLES)]
)
_ROLLOUT_4 = _older_struct(Rollout, **_NO_THINKING)
_GROUP_4 = _older_struct(
    Group, older_versions=None, rollouts=Annotated[list[_ROLLOUT_4], msgspec.Meta(max_length=MAX_SAMPLES)]
)
_THINKING_5: dict[str, Any] = {"num_thinking_tokens": 0, "is_thinking_finished": True}

_MANIFEST_4 = _older_struct(WeightManifest, base_steps=None)
_ANNOUNCEMENT_2 = _older_struct(Announcement)
_NO_OLDER: dict[str, Any] = {"older_versions": []}


def _ticket_2(body: msgspec.Raw) -> bytes:
    """A ticket of a build whose tasks had one verifier, and no environment."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_TICKET_2))
    task = msgspec.structs.asdict(fields["task"])
    rewards = [{"name": task.pop("verifier"), "weight": 1.0}]
    return msgspec.msgpack.encode(fields | {"task": task | {"rewards": rewards, "environment": ""}})


def _group_2(body: msgspec.Raw) -> bytes:
    """A group of a build whose rollouts had one turn, and a reward without its parts."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_GROUP_2))
    new: dict[str, Any] = {"scores": [], "turn_rewards": _Array("<f4", b""), **_THINKING_5}
    rollouts: list[dict[str, Any]] = [msgspec.structs.asdict(rollout) | new for rollout in fields["rollouts"]]
    return msgspec.msgpack.encode(fields | {"rollouts": rollouts} | _NO_OLDER)


def _group_3(body: msgspec.Raw) -> bytes:
    """A group of a build whose verifiers did not say which answer they read."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_GROUP_3))
    rollouts: list[dict[str, Any]] = [msgspec.structs.asdict(rollout) for rollout in fields["rollouts"]]
    for rollout in rollouts:
        rollout["scores"] = [msgspec.structs.asdict(score) | {"answer": None} for score in rollout["scores"]]
        rollout |= _THINKING_5
    return msgspec.msgpack.encode(fields | {"rollouts": rollouts} | _NO_OLDER)


def _group_4(body: msgspec.Raw) -> bytes:
    """Reads a group of a build that told neither thinking from answers nor the weights of earlier incarnations."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_GROUP_4))
    rollouts: list[dict[str, Any]] = [msgspec.structs.asdict(rollout) | _THINKING_5 for rollout in fields["rollouts"]]
    return msgspec.msgpack.encode(fields | {"rollouts": rollouts} | _NO_OLDER)


def _manifest_4(body: msgspec.Raw) -> bytes:
    """Reads a manifest of a build that did not say where the learner's incarnations began."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_MANIFEST_4))
    return msgspec.msgpack.encode(fields | {"base_steps": []})


def _announcement_2(body: msgspec.Raw) -> bytes:
    """Reads an announcement of such a manifest."""
    fields = msgspec.structs.asdict(msgspec.msgpack.decode(body, type=_ANNOUNCEMENT_2))
    return msgspec.msgpack.encode(fields | {"manifest": msgspec.Raw(_manifest_4(fields["manifest"]))})


_OLDER: dict[tuple[type, int], Callable[[msgspec.Raw], bytes]] = {
    (Ticket, 2): _ticket_2,
    (Group, 2): _group_2,
    (Group, 3): _group_3,
    (Group, 4): _group_4,
    (WeightManifest, 4): _manifest_4,
    (Announcement, 2): _announcement_2,
}
"""Older forms that are read: from a body of theirs to one of today's. A run goes on that an older build began."""


def describe_formats() -> str:
    """The forms that this build speaks, as one line that is compared between machines."""
    return " ".join(f"{t.__name__}:{number}" for t, number in sorted(FORMATS.items(), key=lambda f: f[0].__name__))


def _brief(text: str) -> str:
    """What may stand in an error and a log of what somebody else wrote: one printable line, not megabytes."""
    if len(text) > _MAX_ERROR_CHARS:
        half = _MAX_ERROR_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _names() -> str:
    return ", ".join(t.__name__ for t in FORMATS)


@functools.cache
def _strict(type_: type) -> Any:
    """A struct with the dataclass's fields, all required and no others allowed.

    msgspec skips unknown keys of a dataclass and fills in its defaults; between two builds that
    disagree about a field, both would be silent losses.
    """
    hints = typing.get_type_hints(type_, include_extras=True)
    fields = [(f.name, _strict_field(hints[f.name])) for f in dataclasses.fields(type_)]
    return msgspec.defstruct(type_.__name__, fields, forbid_unknown_fields=True)


def _strict_field(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return _strict(typing.cast(type, hint))
    if hint is int:
        return _INT64
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated and isinstance(args[1], msgspec.Meta):
        return Annotated[_strict_field(args[0]), args[1]]
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(a if a is ... else _strict_field(a) for a in args)]
    if isinstance(hint, types.UnionType):
        return functools.reduce(lambda a, b: a | b, (_strict_field(a) for a in args))
    return _Array if _is_array(hint) else hint


def _is_array(hint: Any) -> bool:
    return getattr(hint, "array_type", None) is np.ndarray  # jaxtyping's mark on Int32[np.ndarray, "T"]


def _pack(value: Any) -> Any:
    if is_array(value) and value.ndim == 1 and value.dtype in _NAMES:
        name = _NAMES[value.dtype]
        return _Array(name, value.astype(name, copy=False).tobytes())
    if isinstance(value, np.generic):
        return typing.cast("np.generic[Any]", value).item()
    raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')} does not travel")


def _unpack(_: type, value: Any) -> np.ndarray:
    if not isinstance(value, _Array) or value.dtype not in _DTYPES:
        got = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"an array's dtype must be one of {list(_DTYPES)}, got {_brief(repr(got))}")
    if len(value.data) % _DTYPES[value.dtype].itemsize:
        raise ValueError(f"{len(value.data)} bytes are no whole number of {value.dtype}")
    if value.dtype == "|b1" and value.data.strip(b"\x00\x01"):
        # strip stops at the first other byte from either end, so a rest means one exists.
        raise ValueError("a bool array holds bytes other than 0 and 1")
    array = np.frombuffer(value.data, value.dtype).astype(_DTYPES[value.dtype], copy=False)
    array.flags.writeable = False
    return array
