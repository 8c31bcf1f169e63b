"""Chunks of a file from whatever place has it, into memory: ranges in parallel, each chunk verified.

Also those of a delta, which are proved by what they make of the version before.

What arrived stays: a broken connection, a place that fails and a bad chunk cost only what was on its way.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
from absl import logging

from bridge.published import FileEntry
from bridge.snapshots.chunks import has_chunk
from bridge.snapshots.layout import SnapshotError, SupersededError, UnreachableError
from bridge.snapshots.places import BrokenError, NotThereError, Place, RefusedError

_STOP_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a download deals with a place that is slow, silent or wrong."""

    num_ranges: int = 4
    """Ranges read at once, on a good day."""
    range_bytes: int = 16 * 2**20
    """Size of a range, on a good day. After a failure fewer and shorter ones are read, down to one of one chunk."""
    silence_s: float = 10.0
    """A connection on which a block did not arrive within this time is given up."""
    give_up_s: float = 60.0
    """A download that no new chunk has arrived of for so long fails; what is there stays."""
    max_bad: int = 3
    """Copies of one chunk that did not match its hash before a place is given up."""
    first_backoff_s: float = 0.2
    last_backoff_s: float = 2.0


class StoppedError(SnapshotError):
    """A download that was told to stop; what is there stays."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What a download took."""

    num_bytes: int = 0
    """Bytes that arrived, bad ones included."""
    num_bad: int = 0
    """Chunks that arrived and did not match their hash."""
    num_breaks: int = 0
    """Times that a place failed in the middle."""
    num_by_delta: int = 0
    """Chunks that were made from the version before."""
    num_failed_deltas: int = 0
    """Deltas that did not lead to all of the version, so that the rest was fetched in full."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A file that comes piece by piece, and how a piece that arrived is proved."""

    name: str
    """The file's, in each place."""
    num: int
    num_bytes: int
    """Of all of them."""
    where: Callable[[int], tuple[int, int]]
    """Where a piece begins and ends, in bytes."""
    is_right: Callable[[int], bool]
    """Whether the piece that was put there is what was announced; called in a thread of its own."""

    @classmethod
    def of(cls, file: FileEntry, into: np.ndarray) -> "Pieces":
        """The chunks of a data file that arrives in `into`."""
        return cls(
            name=file.name,
            num=file.num_chunks,
            num_bytes=file.num_bytes,
            where=file.chunk,
            is_right=lambda index: has_chunk(into, file, index),
        )


def download(
    pieces: Pieces,
    places: Sequence[tuple[str, Callable[[], Place]]],
    into: np.ndarray,
    *,
    chunks: Iterable[int],
    stop: threading.Event,
    patience: Patience,
    tally: Tally,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fills `chunks` of `into`, each verified. Blocks its thread; runs an event loop of its own.

    Args:
      pieces: the file, and what its pieces must be.
      places: (what to call it, what opens it), the best one first.
      into: uint8, as long as the file.
      chunks: the pieces that are wanted.
      stop: once set, the download ends within a moment.
      patience: with failures.
      tally: what it takes is added here, also where it fails.
      clock: monotonic, in seconds.

    Raises:
      SupersededError: every place says that it has no such version (any more).
      StoppedError: `stop` was set.
      UnreachableError: no place could be read for long.
      SnapshotError: each place refused, or chunks were bad again and again.
    """
    work = _Download(pieces, into, chunks, patience, tally, clock)
    asyncio.run(_until(work.run(places), stop, num_threads=patience.num_ranges))


async def _until(work: Coroutine[Any, Any, None], stop: threading.Event, *, num_threads: int) -> None:
    """Runs `work` to its end, or until `stop` is set; each of its ranges needs one thread at a time."""
    threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-download")
    asyncio.get_running_loop().set_default_executor(threads)
    task = asyncio.create_task(work)
    while not task.done():
        if stop.is_set():
            task.cancel()
        await asyncio.wait({task}, timeout=_STOP_POLL_S)
    if task.cancelled():
        raise StoppedError("a download was told to stop")
    task.result()


class _Download:
    def __init__(
        self,
        pieces: Pieces,
        into: np.ndarray,
        chunks: Iterable[int],
        patience: Patience,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.tally = tally
        self._pieces, self._into = pieces, into
        self._missing = collections.deque(sorted(chunks))
        self._num_bad: collections.Counter[int] = collections.Counter()
        self._patience, self._clock = patience, clock
        self._arrived_s = clock()
        # All ranges have work to do, also where the pieces are small.
        fair = -(-pieces.num // patience.num_ranges)
        self._max_span = max(1, min(fair, patience.range_bytes * pieces.num // max(1, pieces.num_bytes)))
        self._width, self._span = patience.num_ranges, self._max_span
        """Ranges at once, and chunks in each."""

    async def run(self, places: Sequence[tuple[str, Callable[[], Place]]]) -> None:
        left = dict(places)
        why: dict[str, str] = {}
        backoff_s = self._patience.first_backoff_s
        is_gone = bool(left)
        while self._missing:
            num_missing = len(self._missing)
            for url, open_ in list(left.items()):
                try:
                    await self._read_from(open_())
                except NotThereError as e:
                    why[url] = str(e)
                    del left[url]
                except (RefusedError, ValueError) as e:
                    why[url], is_gone = str(e), False
                    del left[url]
                except BrokenError as e:
                    why[url] = str(e)
                    self.tally.num_breaks += 1
                    logging.warning("snapshot place failed url=%s chunks_left=%d reason=%s", url, len(self._missing), e)
                if not self._missing:
                    return
            self._check_hope(left, why, is_gone)
            if len(self._missing) < num_missing:
                backoff_s = self._patience.first_backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(self._patience.last_backoff_s, 2 * backoff_s)

    def _check_hope(self, left: dict[str, Callable[[], Place]], why: dict[str, str], is_gone: bool) -> None:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in why.items()) or "it has no source"
        if not left and is_gone:
            raise SupersededError(f"no place has it any more: {reasons}")
        silent_s = self._clock() - self._arrived_s
        if not left or silent_s >= self._patience.give_up_s:
            num_there = self._pieces.num - len(self._missing)
            since = "" if not left else f" for {silent_s:.0f} s"
            raise (UnreachableError if left else SnapshotError)(
                f"it can't be fetched{since}, {num_there} of {self._pieces.num} chunks are there: {reasons}"
            )

    async def _read_from(self, place: Place) -> None:
        """Reads ranges until nothing is missing; after a failure those on their way are read to their end."""
        running: set[asyncio.Task[None]] = set()
        failure: Exception | None = None
        try:
            while running or (self._missing and failure is None):
                while self._missing and failure is None and len(running) < self._width:
                    running.add(asyncio.create_task(self._read_range(place, self._take())))
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if isinstance(error, BrokenError | RefusedError):
                        failure = failure if isinstance(failure, RefusedError) else error
                        self._width, self._span = max(1, self._width // 2), max(1, self._span // 2)
                    elif error is not None:
                        raise error
                    else:
                        self._width = min(self._patience.num_ranges, self._width + 1)
                        self._span = min(self._max_span, 2 * self._span)
        finally:
            for task in running:
                task.cancel()
            if running:  # so that nothing of them comes back to an event loop that is closed
                await asyncio.wait(running)
            place.close()
        if failure is not None:
            raise failure

    def _take(self) -> list[int]:
        """The next chunks that follow on one another."""
        taken = [self._missing.popleft()]
        where = self._pieces.where
        while self._missing and where(self._missing[0])[0] == where(taken[-1])[1] and len(taken) < self._span:
            taken.append(self._missing.popleft())
        return taken

    async def _read_range(self, place: Place, chunks: list[int]) -> None:
        """Reads chunks that follow on one another; what is not there in the end is missing again."""
        position, end = self._pieces.where(chunks[0])[0], self._pieces.where(chunks[-1])[1]
        waiting = collections.deque(chunks)
        try:
            steps = place.read(self._pieces.name, position, self._into[position:end].data)
            async with contextlib.aclosing(steps):
                while position < end:
                    async with asyncio.timeout(self._patience.silence_s):
                        num_bytes = await anext(steps)
                    self.tally.num_bytes += num_bytes
                    position += num_bytes
                    while waiting and self._pieces.where(waiting[0])[1] <= position:
                        await self._verify(waiting.popleft())
        except StopAsyncIteration:
            raise BrokenError(f"ended at byte {position}, {end} expected") from None
        except TimeoutError:
            raise BrokenError(f"sent nothing for {self._patience.silence_s:.0f} s") from None
        finally:
            self._missing.extendleft(reversed(waiting))

    async def _verify(self, chunk: int) -> None:
        """Hashes a chunk in another thread, so that the next one is copied meanwhile."""
        if await asyncio.to_thread(self._pieces.is_right, chunk):
            self._arrived_s = self._clock()
            return
        self.tally.num_bad += 1
        self._num_bad[chunk] += 1
        self._missing.append(chunk)
        message = f"chunk {chunk} does not match its hash"
        if self._num_bad[chunk] >= self._patience.max_bad:
            self._num_bad[chunk] = 0  # another place may do better
            raise RefusedError(f"corrupt: {message}, {self._patience.max_bad} times")
        logging.warning("snapshot %s; it is fetched again", message)
