"""Verified parallel range download; sources over obstore.

Also those of a delta, which are proved by what they make of the version before.

What arrived stays: a broken connection, a place that fails and a bad chunk cost only what was on its way.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import obstore
from absl import logging
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore

from bridge.files import first_line
from bridge.snapshots.shard_map import ShardMap
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, UnreachableError, is_chunk
from bridge.weight_types import FileEntry


class SourceTransientError(Exception):
    """A place failed, and may do better when it is asked again."""


class SourceRefusedError(Exception):
    """A place refused, or does not have what is wanted: asking again is no use."""


class SourceMissingError(SourceRefusedError):
    """A place does not have this version (any more)."""


_BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*)?(\w+)")
_CAUSE = re.compile(r"kind: (ConnectionRefused|ConnectionReset|TimedOut|HostUnreachable|NetworkUnreachable)")
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**16, 2**20
"""What is handed to Python at once: more where it comes fast, so that a slow place is still seen to send something.
Measured on loopback: 256 KiB are slower than 1 MiB, 4 MiB no faster."""
_BLOCK_S = 0.25
"""As much as a range brings in this time is what the next one hands over at once."""


class ObjectSource:
    """What obstore opened (`bridge.object_store.open_source`)."""

    def __init__(self, store: ObjectStore) -> None:
        """Nothing is asked of it yet."""
        self._store = store
        self._block_bytes = _MIN_BLOCK_BYTES

    async def read(self, name: str, start: int, into: memoryview) -> AsyncGenerator[int]:
        """Fills `into` with a file's bytes from `start` on, in order.

        Gives how many bytes more are there now: 0 once the place has answered, then block after block. When a step
        was cancelled and has ended, nothing is written any more.

        Raises:
          BrokenError: the place failed, or sent something other than this range.
          RefusedError: it refused; SourceMissingError: it has no such file.
        """
        position, size = 0, len(into)
        try:
            result = await obstore.get_async(self._store, name, options={"range": (start, start + size)})
            yield 0
            begin_s = time.monotonic()
            async for block in result.stream(min_chunk_size=self._block_bytes):
                arrived = memoryview(block)
                if arrived.nbytes > size - position:
                    raise SourceTransientError(f"sent more than the {size - position} bytes that were left")
                into[position : position + arrived.nbytes] = arrived
                position += arrived.nbytes
                in_a_block = position * _BLOCK_S / max(time.monotonic() - begin_s, 1e-6)
                self._block_bytes = round(min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, in_a_block)))
                yield arrived.nbytes
        except FileNotFoundError:
            raise SourceMissingError("not found") from None
        except (UnauthenticatedError, PermissionDeniedError) as e:
            raise SourceRefusedError(f"refused the token or the credentials: {_first_line(e)}") from None
        except NotSupportedError as e:
            raise SourceRefusedError(_first_line(e)) from None
        except (BaseError, OSError) as e:
            if " 410 Gone" in _first_line(e):
                raise SourceMissingError("superseded") from None
            if bad := _BAD_CERTIFICATE.search(str(e)):
                raise SourceRefusedError(f"its certificate is refused: {bad.group(1)}") from None
            raise SourceTransientError(_first_line(e)) from None


def _first_line(error: Exception) -> str:
    """What is wrong, of an error that goes on with its whole history."""
    cause = _CAUSE.search(str(error))
    line = first_line(error, max_chars=2000)
    return f"{line}: {cause.group(1)}" if cause else line


_STOP_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How a download deals with a place that is slow, silent or wrong."""

    num_ranges: int = 4
    """Ranges read at once, on a good day."""
    range_bytes: int = 64 * 2**20
    """Size of a range, on a good day. After a failure fewer and shorter ones are read, down to one of one chunk.
    Measured on loopback: to be asked every 16 MiB takes reader and server a third more CPU."""
    silence_s: float = 10.0
    """A connection on which a block did not arrive within this time is given up."""
    give_up_s: float = 60.0
    """A download that no new chunk has arrived of for so long fails; what is there stays."""
    max_bad: int = 3
    """Copies of one chunk that did not match its hash before a place is given up."""
    first_backoff_s: float = 0.2
    last_backoff_s: float = 2.0

    def shared_by(self, num: int) -> "RetryPolicy":
        """What each of so many downloads at once has, which together read as many ranges, and hold as many bytes."""
        num_ranges = max(1, self.num_ranges // num)
        range_bytes = max(1, self.num_ranges * self.range_bytes // (num_ranges * num))
        return dataclasses.replace(self, num_ranges=num_ranges, range_bytes=range_bytes)


class Stop(Protocol):
    """Whether to stop: a `threading.Event`, or several in one."""

    def is_set(self) -> bool:
        """Whether it is time; looked at again and again."""
        ...


class DownloadStoppedError(SnapshotError):
    """A download that was told to stop; what is there stays."""


@dataclasses.dataclass(slots=True)
class DownloadStats:
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

    @classmethod
    def sum(cls, tallies: "Iterable[DownloadStats]") -> "DownloadStats":
        """Of several downloads."""
        total = cls()
        for tally in tallies:
            for field in dataclasses.fields(cls):
                setattr(total, field.name, getattr(total, field.name) + getattr(tally, field.name))
        return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A file that comes chunk by chunk; where a chunk is received, and how it is proved and brought to its place."""

    name: str
    """The file's, in each place."""
    num: int
    num_bytes: int
    """Of all of them."""
    where: Callable[[int], tuple[int, int]]
    """Where a chunk begins and ends in the file, in bytes."""
    room: Callable[[int, int], np.ndarray]
    """Memory for these bytes of the file."""
    accept: Callable[[int, np.ndarray], bool]
    """Whether a chunk that was received is what was announced: then it is where it belongs. Called in a thread of its
    own."""

    @classmethod
    def of(cls, file: FileEntry, placement: ShardMap, whole: np.ndarray) -> "Chunks":
        """The chunks of a piece of a snapshot that arrives in `whole`."""

        def accept(index: int, chunk: np.ndarray) -> bool:
            if not is_chunk(chunk, file, index):
                return False
            placement.put(chunk, file.chunk(index)[0], whole)
            return True

        return cls(
            name=file.name,
            num=file.num_chunks,
            num_bytes=file.num_bytes,
            where=file.chunk,
            room=lambda start, end: placement.room(whole, start, end),
            accept=accept,
        )


def download(
    chunks: Chunks,
    places: Sequence[tuple[str, Callable[[], ObjectSource]]],
    *,
    wanted: Iterable[int],
    stop: Stop,
    patience: RetryPolicy,
    tally: DownloadStats,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Brings the chunks that are wanted, each verified. Blocks its thread; runs an event loop of its own.

    Args:
      chunks: the file, what its chunks must be, and where they go.
      places: (what to call it, what opens it), the best one first.
      wanted: the chunks to bring, by index.
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
    work = _Download(chunks, wanted, patience, tally, clock)
    asyncio.run(_until(work.run(places), stop, num_threads=patience.num_ranges))


async def _until(work: Coroutine[Any, Any, None], stop: Stop, *, num_threads: int) -> None:
    """Runs `work` to its end, or until `stop` is set; each of its ranges needs one thread at a time."""
    threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-download")
    asyncio.get_running_loop().set_default_executor(threads)
    task = asyncio.create_task(work)
    while not task.done():
        if stop.is_set():
            task.cancel()
        await asyncio.wait({task}, timeout=_STOP_POLL_S)
    if task.cancelled():
        raise DownloadStoppedError("a download was told to stop")
    task.result()


class _Download:
    def __init__(
        self,
        chunks: Chunks,
        wanted: Iterable[int],
        patience: RetryPolicy,
        tally: DownloadStats,
        clock: Callable[[], float],
    ) -> None:
        self.tally = tally
        self._chunks = chunks
        self._missing = collections.deque(sorted(wanted))
        self._num_bad: collections.Counter[int] = collections.Counter()
        self._patience, self._clock = patience, clock
        self._arrived_s = clock()
        # All ranges have work to do, also where the chunks are small.
        fair = -(-chunks.num // patience.num_ranges)
        self._max_span = max(1, min(fair, patience.range_bytes * chunks.num // max(1, chunks.num_bytes)))
        self._width, self._span = patience.num_ranges, self._max_span
        """Ranges at once, and chunks in each."""

    async def run(self, places: Sequence[tuple[str, Callable[[], ObjectSource]]]) -> None:
        left = dict(places)
        why: dict[str, str] = {}
        backoff_s = self._patience.first_backoff_s
        is_gone = bool(left)
        while self._missing:
            num_missing = len(self._missing)
            for url, open_ in list(left.items()):
                try:
                    await self._read_from(open_())
                except SourceMissingError as e:
                    why[url] = str(e)
                    del left[url]
                except (SourceRefusedError, ValueError) as e:
                    why[url], is_gone = str(e), False
                    del left[url]
                except SourceTransientError as e:
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

    def _check_hope(self, left: dict[str, Callable[[], ObjectSource]], why: dict[str, str], is_gone: bool) -> None:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in why.items()) or "it has no source"
        if not left and is_gone:
            raise SupersededError(f"no place has it any more: {reasons}")
        silent_s = self._clock() - self._arrived_s
        if not left or silent_s >= self._patience.give_up_s:
            num_there = self._chunks.num - len(self._missing)
            since = "" if not left else f" for {silent_s:.0f} s"
            raise (UnreachableError if left else SnapshotError)(
                f"it can't be fetched{since}, {num_there} of {self._chunks.num} chunks are there: {reasons}"
            )

    async def _read_from(self, place: ObjectSource) -> None:
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
                    if isinstance(error, SourceTransientError | SourceRefusedError):
                        failure = failure if isinstance(failure, SourceRefusedError) else error
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
        if failure is not None:
            raise failure

    def _take(self) -> list[int]:
        """The next chunks that follow on one another."""
        taken = [self._missing.popleft()]
        where = self._chunks.where
        while self._missing and where(self._missing[0])[0] == where(taken[-1])[1] and len(taken) < self._span:
            taken.append(self._missing.popleft())
        return taken

    async def _read_range(self, place: ObjectSource, chunks: list[int]) -> None:
        """Reads chunks that follow on one another; what is not there in the end is missing again."""
        where = self._chunks.where
        begin, end = where(chunks[0])[0], where(chunks[-1])[1]
        position = begin
        waiting = collections.deque(chunks)
        try:
            room = self._chunks.room(begin, end)
            steps = place.read(self._chunks.name, begin, room.data)
            async with contextlib.aclosing(steps):
                while position < end:
                    async with asyncio.timeout(self._patience.silence_s):
                        num_bytes = await anext(steps)
                    self.tally.num_bytes += num_bytes
                    position += num_bytes
                    while waiting and where(waiting[0])[1] <= position:
                        start, stop = where(waiting[0])
                        await self._verify(waiting.popleft(), room[start - begin : stop - begin])
        except StopAsyncIteration:
            raise SourceTransientError(f"ended at byte {position}, {end} expected") from None
        except TimeoutError:
            raise SourceTransientError(f"sent nothing for {self._patience.silence_s:.0f} s") from None
        finally:
            self._missing.extendleft(reversed(waiting))

    async def _verify(self, chunk: int, received: np.ndarray) -> None:
        """Hashes a chunk in another thread, so that the next one is copied meanwhile."""
        if await asyncio.to_thread(self._chunks.accept, chunk, received):
            self._arrived_s = self._clock()
            return
        self.tally.num_bad += 1
        self._num_bad[chunk] += 1
        self._missing.append(chunk)
        message = f"chunk {chunk} does not match its hash"
        if self._num_bad[chunk] >= self._patience.max_bad:
            self._num_bad[chunk] = 0  # another place may do better
            raise SourceRefusedError(f"corrupt: {message}, {self._patience.max_bad} times")
        logging.warning("snapshot %s; it is fetched again", message)
