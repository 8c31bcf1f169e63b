"""Messages between host and sandbox: lengths of head and body, JSON head, body of concatenated byte strings."""

import json
import struct

LENGTHS = struct.Struct(">II")
MAX_HEAD_BYTES = 2**20


def pack(head, blobs=()):
    """Returns an encoded message; `head` is a dict, to which "blobs", the lengths of the byte strings, is added."""
    text = json.dumps({**head, "blobs": [len(b) for b in blobs]}).encode()
    return LENGTHS.pack(len(text), sum(map(len, blobs))) + text + b"".join(blobs)


def unpack(text, body):
    """Returns head and byte strings of a message. Raises ValueError if the message is malformed."""
    try:
        head = json.loads(text)
    except RecursionError as e:
        raise ValueError("message head nested too deeply") from e
    sizes = head.pop("blobs", None) if isinstance(head, dict) else None
    if not isinstance(sizes, list) or not all(type(s) is int and s >= 0 for s in sizes) or sum(sizes) != len(body):
        raise ValueError("message lengths do not match its body")
    blobs, at = [], 0
    for size in sizes:
        blobs.append(body[at : at + size])
        at += size
    return head, blobs
