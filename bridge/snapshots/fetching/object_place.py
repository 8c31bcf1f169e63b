"""A bucket or a web server as a place to read from: obstore reads and decrypts outside Python's lock."""

import re
import time
from collections.abc import AsyncGenerator

import obstore
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore

from bridge.files import first_line
from bridge.snapshots.fetching.places import BrokenError, NotThereError, RefusedError

_BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*)?(\w+)")
_CAUSE = re.compile(r"kind: (ConnectionRefused|ConnectionReset|TimedOut|HostUnreachable|NetworkUnreachable)")
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**16, 2**20
"""What is handed to Python at once: more where it comes fast, so that a slow place is still seen to send something.
Measured on loopback: 256 KiB are slower than 1 MiB, 4 MiB no faster."""
_BLOCK_S = 0.25
"""As much as a range brings in this time is what the next one hands over at once."""


class ObjectPlace:
    """What obstore opened (`bridge.buckets.open_place`)."""

    def __init__(self, store: ObjectStore) -> None:
        """Nothing is asked of it yet."""
        self._store = store
        self._block_bytes = _MIN_BLOCK_BYTES

    async def read(self, name: str, start: int, into: memoryview) -> AsyncGenerator[int]:
        """As `Place.read`."""
        position, size = 0, len(into)
        try:
            result = await obstore.get_async(self._store, name, options={"range": (start, start + size)})
            yield 0
            begin_s = time.monotonic()
            async for block in result.stream(min_chunk_size=self._block_bytes):
                arrived = memoryview(block)
                if arrived.nbytes > size - position:
                    raise BrokenError(f"sent more than the {size - position} bytes that were left")
                into[position : position + arrived.nbytes] = arrived
                position += arrived.nbytes
                in_a_block = position * _BLOCK_S / max(time.monotonic() - begin_s, 1e-6)
                self._block_bytes = round(min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, in_a_block)))
                yield arrived.nbytes
        except FileNotFoundError:
            raise NotThereError("not found") from None
        except (UnauthenticatedError, PermissionDeniedError) as e:
            raise RefusedError(f"refused the token or the credentials: {_first_line(e)}") from None
        except NotSupportedError as e:
            raise RefusedError(_first_line(e)) from None
        except (BaseError, OSError) as e:
            if " 410 Gone" in _first_line(e):
                raise NotThereError("superseded") from None
            if bad := _BAD_CERTIFICATE.search(str(e)):
                raise RefusedError(f"its certificate is refused: {bad.group(1)}") from None
            raise BrokenError(_first_line(e)) from None

    def close(self) -> None:
        """Nothing is kept open that would not close by itself."""


def _first_line(error: Exception) -> str:
    """What is wrong, of an error that goes on with its whole history."""
    cause = _CAUSE.search(str(error))
    line = first_line(error, max_chars=2000)
    return f"{line}: {cause.group(1)}" if cause else line
