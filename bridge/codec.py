"""Wire format: msgpack, decoded into validated types. Pickle is never used.

A message is `[format, type name, body]`. The body is a map with exactly the type's fields, without those that are
msgspec's UNSET. An array in the body is `[dtype, raw little-endian bytes]`, with its shape as third element if it is no
vector. `decode` raises ValueError for any malformed message. A decoded value has passed its type's `__post_init__`.
"""

import dataclasses
import functools
import types
import typing
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from bridge.heartbeat_types import Heartbeat
from bridge.progress_types import TicketProgress
from bridge.rollout_types import Group, Ticket
from bridge.validation import is_array
from bridge.weight_types import Announcement, RunCard, WeightManifest

FORMAT = 14
"""Format number of everything that outlives a process: messages, stores and checkpoints.

It must increase with any change of a wire type's fields, a store's tables or a checkpoint's metadata, except for a new
field that is UNSET by default: older messages lack it, and older builds reject only messages that have it. Every other
number is rejected: no older format can be read."""

TYPES = (Ticket, TicketProgress, Group, WeightManifest, Heartbeat, Announcement, RunCard)

MAX_BYTES = 64 * 2**20
"""Default limit on the size of one message, in bytes."""

_MAX_ERROR_CHARS = 500
_DTYPES = {
    "<i4": np.dtype(np.int32),
    "|b1": np.dtype(np.bool_),
    "<f4": np.dtype(np.float32),
    "|u1": np.dtype(np.uint8),
    "<u2": np.dtype(np.uint16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Readers (SQLite, numpy) store integers in 64 signed bits. msgpack alone would allow 2**64 - 1.
_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

Message = Ticket | TicketProgress | Group | WeightManifest | Heartbeat | Announcement | RunCard

T = TypeVar("T", bound=Message)


class OtherFormatError(ValueError):
    """Error for a message, store or checkpoint with another `FORMAT`."""

    @classmethod
    def of(cls, what: str, number: object) -> "OtherFormatError":
        """Returns the error for `what`, whose format is `number`."""
        return cls(
            f"{what}: expected format {FORMAT}, got {number}. Another build made it: continue the run with that build, "
            "or start another run"
        )


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    type: str
    body: msgspec.Raw


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    data: bytes
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=3)] = ()
    """Shape of an array of several dims; empty for a vector."""


def encode(obj: Message, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Packs a wire type.

    The bytes are decoded once before they are returned. A value that its reader would reject therefore fails in the
    sender, for example a numpy integer that is too large. Raises ValueError if the value has no wire type, is too
    large, or violates its type.
    """
    if type(obj) not in TYPES:
        raise ValueError(f"wire type: expected one of {_names()}, got {type(obj).__name__}")
    try:
        body = msgspec.Raw(msgspec.msgpack.encode(obj, enc_hook=_pack))
    except (TypeError, OverflowError) as e:
        raise ValueError(f"a {type(obj).__name__} cannot be encoded: {e}") from e
    data = msgspec.msgpack.encode(_Message(FORMAT, type(obj).__name__, body))
    decode(type(obj), data, max_bytes=max_bytes)
    return data


def decode(type_: type[T], data: bytes | memoryview, *, max_bytes: int = MAX_BYTES) -> T:
    """Unpacks a message of the given type; its arrays are read-only.

    Raises OtherFormatError if the message has another `FORMAT`, and ValueError if it exceeds `max_bytes`, has another
    type, is malformed, or has an unknown, missing or invalid field.
    """
    if type_ not in TYPES:
        raise ValueError(f"wire type: expected one of {_names()}, got {type_!r}")
    if len(data) > max_bytes:
        raise ValueError(f"message: expected at most {max_bytes} bytes, got {len(data)}")
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        if message.type != type_.__name__:
            raise ValueError(f"message: expected a {type_.__name__}, got a {_brief(repr(message.type))}")
        if message.format != FORMAT:
            raise OtherFormatError.of(message.type, message.format)
        msgspec.msgpack.decode(message.body, type=_strict(type_))  # raises for fields that the next line would skip
        return msgspec.msgpack.decode(message.body, type=type_, dec_hook=_unpack)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as e:
        raise ValueError(f"malformed {type_.__name__} message: {_brief(str(e))}") from None


def _brief(text: str) -> str:
    """Returns untrusted text for an error or log: one printable line of bounded length."""
    if len(text) > _MAX_ERROR_CHARS:
        half = _MAX_ERROR_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _names() -> str:
    return ", ".join(t.__name__ for t in TYPES)


@functools.cache
def _strict(type_: type) -> Any:
    """Returns a struct type that rejects unknown and missing fields (but those UNSET by default).

    msgspec's own dataclass decoding ignores them, so two builds would lose data silently.
    """
    hints = typing.get_type_hints(type_, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        (f.name, _strict_field(hints[f.name]), msgspec.UNSET)
        if f.default is msgspec.UNSET
        else (f.name, _strict_field(hints[f.name]))
        for f in dataclasses.fields(type_)
    ]
    return msgspec.defstruct(type_.__name__, fields, forbid_unknown_fields=True, kw_only=True)


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
    return getattr(hint, "array_type", None) is np.ndarray  # jaxtyping sets it on Int32[np.ndarray, "T"]


def _pack(value: Any) -> Any:
    if is_array(value) and 1 <= value.ndim <= 3 and value.dtype in _NAMES:
        name = _NAMES[value.dtype]
        data = value.astype(name, copy=False).tobytes()
        return (name, data) if value.ndim == 1 else (name, data, value.shape)
    if isinstance(value, np.generic):
        return typing.cast("np.generic[Any]", value).item()
    raise TypeError(
        f"{type(value).__name__} {getattr(value, 'dtype', '')} cannot be serialized; dtypes: {list(_DTYPES)}"
    )


def _unpack(_: type, fields: Any) -> np.ndarray:
    value = msgspec.convert(fields, _Array)
    if value.dtype not in _DTYPES:
        raise ValueError(f"an array's dtype must be one of {list(_DTYPES)}, got {_brief(repr(value.dtype))}")
    if len(value.data) % _DTYPES[value.dtype].itemsize:
        raise ValueError(f"array: {len(value.data)} bytes are not a multiple of the size of {value.dtype}")
    if value.dtype == "|b1" and value.data.strip(b"\x00\x01"):
        # strip stops at the first other byte from either end, so a non-empty rest means that one exists.
        raise ValueError("array: bool values must be bytes 0 and 1")
    array = np.frombuffer(value.data, value.dtype).astype(_DTYPES[value.dtype], copy=False)
    array.flags.writeable = False
    return array.reshape(value.shape) if value.shape else array
