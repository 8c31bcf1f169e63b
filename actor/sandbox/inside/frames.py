"""Messages between host and sandbox: lengths of a JSON head and a body, the head, the body (byte strings in a row)."""

import json
import struct

LENGTHS = struct.Struct(">II")
MAX_HEAD_BYTES = 2**20


def pack(head, blobs=()):
    """A message as it is sent: `head` is a dict, whose key "blobs" becomes the lengths of the byte strings."""
    text = json.dumps({**head, "blobs": [len(b) for b in blobs]}).encode()
    return LENGTHS.pack(len(text), sum(map(len, blobs))) + text + b"".join(blobs)


def unpack(text, body):
    """A message from its two parts.

    Raises:
      ValueError: they don't fit together, or it is none.
    """
    try:
        head = json.loads(text)
    except RecursionError as e:
        raise ValueError("a head too deep to be one") from e
    sizes = head.pop("blobs", None) if isinstance(head, dict) else None
    if not isinstance(sizes, list) or not all(type(s) is int and s >= 0 for s in sizes) or sum(sizes) != len(body):
        raise ValueError("a message whose lengths don't fit its body")
    blobs, at = [], 0
    for size in sizes:
        blobs.append(body[at : at + size])
        at += size
    return head, blobs
