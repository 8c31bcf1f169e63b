"""Wire format: msgpack in, validated types out; never pickle.

A message is `[format, type name, body]`. The body is a map with exactly the type's fields, no more
and no fewer, and an array in it is `[dtype, raw little-endian bytes]`. Whatever is wrong with a
message, `decode` says so with a `ValueError`; what it returns has passed its type's `__post_init__`.
"""

import dataclasses
import functools
import types
import typing
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Ticket
from bridge.validation import is_array
from bridge.weight_types import Announcement, RunCard, WeightManifest

FORMAT = 10
"""Number of the form of everything that outlives a process: messages, stores, and checkpoints.

Any change of a wire type's fields, a store's tables or a checkpoint's books raises it. Another number is refused:
nothing reads an older form.
"""

TYPES = (Ticket, Group, WeightManifest, Heartbeat, Announcement, RunCard)
"""What travels."""

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
    """A message, store or checkpoint of another `FORMAT`."""

    @classmethod
    def of(cls, what: str, number: object) -> "OtherFormatError":
        """Returns the error of `what`, which has another number."""
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


def encode(obj: Message, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Packs a wire type.

    The bytes are decoded once before they leave, so a value that its reader would refuse (a numpy
    integer too large, an array changed after it was checked) fails here, at its maker.

    Raises:
      ValueError: the value is of no wire type, too large, or violates its type.
    """
    if type(obj) not in TYPES:
        raise ValueError(f"no wire type: {type(obj).__name__}; wanted one of {_names()}")
    try:
        body = msgspec.Raw(msgspec.msgpack.encode(obj, enc_hook=_pack))
    except (TypeError, OverflowError) as e:
        raise ValueError(f"a {type(obj).__name__} cannot be encoded: {e}") from e
    data = msgspec.msgpack.encode(_Message(FORMAT, type(obj).__name__, body))
    decode(type(obj), data, max_bytes=max_bytes)
    return data


def decode(type_: type[T], data: bytes | memoryview, *, max_bytes: int = MAX_BYTES) -> T:
    """Unpacks a message of the given type; its arrays are read-only.

    Raises:
      OtherFormatError: another `FORMAT`.
      ValueError: larger than `max_bytes`, another type, truncated or trailing bytes, an unknown or
        missing field, or values the type refuses.
    """
    if type_ not in TYPES:
        raise ValueError(f"no wire type: {type_!r}; wanted one of {_names()}")
    if len(data) > max_bytes:
        raise ValueError(f"message has {len(data)} bytes, the limit is {max_bytes}")
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        if message.type != type_.__name__:
            raise ValueError(f"got a {_brief(repr(message.type))}, wanted a {type_.__name__}")
        if message.format != FORMAT:
            raise OtherFormatError.of(message.type, message.format)
        fields = msgspec.msgpack.decode(message.body, type=_strict(type_))
        return msgspec.convert(fields, type_, from_attributes=True, dec_hook=_unpack)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as e:
        raise ValueError(f"malformed {type_.__name__} message: {_brief(str(e))}") from None


def _brief(text: str) -> str:
    """What may stand in an error and a log of what somebody else wrote: one printable line, not megabytes."""
    if len(text) > _MAX_ERROR_CHARS:
        half = _MAX_ERROR_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _names() -> str:
    return ", ".join(t.__name__ for t in TYPES)


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
