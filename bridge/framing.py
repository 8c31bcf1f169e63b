"""Messages of a byte stream: four bytes of length (big-endian), then the message."""

import struct

_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size


def frame(body: bytes, *, max_bytes: int) -> bytes:
    """Returns a message as it is sent.

    Raises:
      ValueError: it is too large.
    """
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes, at most {max_bytes} may be sent")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes, *, max_bytes: int) -> int:
    """Returns how many bytes follow the `HEAD_BYTES`.

    Raises:
      ValueError: too many.
    """
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes, at most {max_bytes} may come")
    return length
