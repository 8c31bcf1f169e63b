"""Where a version's files are read from: one contract for whoever has them."""

from collections.abc import AsyncGenerator
from typing import Protocol


class BrokenError(Exception):
    """A place failed, and may do better when it is asked again."""


class RefusedError(Exception):
    """A place refused, or does not have what is wanted: asking again is no use."""


class NotThereError(RefusedError):
    """A place does not have this version (any more)."""


class Place(Protocol):
    """A folder of files somewhere else. Used within one event loop."""

    def read(self, name: str, start: int, into: memoryview) -> AsyncGenerator[int]:
        """Fills `into` with a file's bytes from `start` on, in order.

        Gives how many bytes more are there now: 0 once the place has answered, then block after block. When a step
        was cancelled and has ended, nothing is written any more.

        Raises:
          BrokenError: the place failed, or sent something other than this range.
          RefusedError: it refused; NotThereError: it has no such file.
        """
        ...

    def close(self) -> None:
        """Lets go of what is open between two ranges; ranges that are being read end by themselves."""
        ...
