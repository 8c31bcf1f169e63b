"""Verified parallel range download from object stores.

Verified chunks are kept: a broken connection, a failing source or a corrupt chunk costs only the data in transit. A
delta's chunks are verified by the chunks that they reconstruct.
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
    """Error of a source that may succeed on a retry."""


class SourceRefusedError(Exception):
    """Error of a source that rejected the request or lacks the data; a retry is useless."""


class SourceMissingError(SourceRefusedError):
    """Error of a source that does not have this version, or not any more."""


_BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*)?(\w+)")
_CAUSE = re.compile(r"kind: (ConnectionRefused|ConnectionReset|TimedOut|HostUnreachable|NetworkUnreachable)")
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**16, 2**20
"""Bytes per block handed to Python: larger for fast sources, and small for slow ones so that they show progress.
Measured on loopback: 256 KiB are slower than 1 MiB, and 4 MiB are no faster."""
_BLOCK_S = 0.25
"""Target duration of one block, in seconds; sets the block size of the next range."""


class ObjectSource:
    """Source over an object store (`bridge.object_store.open_source`)."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._block_bytes = _MIN_BLOCK_BYTES

    async def read(self, name: str, start: int, into: memoryview) -> AsyncGenerator[int]:
        """Fills `into` with a file's bytes from `start` on, in order.

        Yields the number of new bytes: 0 once the source has answered, and then per block. After a cancelled step has
        ended, nothing more is written. Raises SourceTransientError or SourceRefusedError.
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
    """Returns an error's first line, with its cause if that is in a later line."""
    cause = _CAUSE.search(str(error))
    line = first_line(error, max_chars=2000)
    return f"{line}: {cause.group(1)}" if cause else line


_STOP_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry policy of a download for slow, silent or faulty sources."""

    num_ranges: int = 4
    range_bytes: int = 64 * 2**20
    """Largest range, in bytes. Failures reduce the number and size of ranges, down to one range of one chunk. Measured
    on loopback: ranges of 16 MiB cost reader and server a third more CPU."""
    silence_s: float = 10.0
    """Seconds without a block after which a connection is closed."""
    give_up_s: float = 60.0
    """Seconds without a new chunk after which a download fails; verified chunks are kept."""
    max_bad: int = 3
    """Corrupt copies of one chunk after which a source is dropped."""
    first_backoff_s: float = 0.2
    last_backoff_s: float = 2.0

    def shared_by(self, num: int) -> "RetryPolicy":
        """Returns the policy of each of `num` concurrent downloads that together follow this policy."""
        num_ranges = max(1, self.num_ranges // num)
        range_bytes = max(1, self.num_ranges * self.range_bytes // (num_ranges * num))
        return dataclasses.replace(self, num_ranges=num_ranges, range_bytes=range_bytes)


class Stop(Protocol):
    """Stop signal, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Returns True if the download must stop; polled."""
        ...


class DownloadStoppedError(SnapshotError):
    """Error of a download that was stopped; verified chunks are kept."""


@dataclasses.dataclass(slots=True)
class DownloadStats:
    """Counters of a download."""

    num_requests: int = 0
    num_bytes: int = 0
    """Received bytes, including corrupt ones."""
    num_bad: int = 0
    """Received chunks with a wrong hash."""
    num_breaks: int = 0
    """Transient failures of a source."""
    num_by_delta: int = 0
    """Chunks reconstructed from the previous version."""
    num_failed_deltas: int = 0
    """Deltas that did not reconstruct all chunks, so that the rest was fetched in full."""

    @classmethod
    def sum(cls, tallies: "Iterable[DownloadStats]") -> "DownloadStats":
        """Returns the sum over several downloads."""
        total = cls()
        for tally in tallies:
            for field in dataclasses.fields(cls):
                setattr(total, field.name, getattr(total, field.name) + getattr(tally, field.name))
        return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """File that is downloaded chunk by chunk: where chunks are received, and how they are verified and stored."""

    name: str
    """File name in each source."""
    num: int
    num_bytes: int
    """Total size of all chunks."""
    where: Callable[[int], tuple[int, int]]
    """Returns the first byte of a chunk in the file and the byte after its last."""
    room: Callable[[int, int], np.ndarray]
    """Returns memory for a byte range of the file."""
    accept: Callable[[int, np.ndarray], bool]
    """Verifies and stores a received chunk; returns False if it is corrupt. Called in a thread."""

    @classmethod
    def of(cls, file: FileEntry, placement: ShardMap, whole: np.ndarray) -> "Chunks":
        """Returns the chunks of a shard that is received into `whole`."""

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
) -> None:
    """Downloads and verifies chunks. Blocks its thread and runs its own event loop.

    Args:
      places: (name, opener) of each source, best first.
      tally: counters, updated even if the download fails.

    Raises:
      SupersededError: every source reports that it does not have the version.
      DownloadStoppedError: `stop` was set.
      UnreachableError: no source could be read for long, or there is none.
      SnapshotError: every source rejected the request, or sent corrupt chunks repeatedly.
    """
    work = _Download(chunks, wanted, patience, tally)
    asyncio.run(_until(work.run(places), stop, num_threads=patience.num_ranges))


async def _until(work: Coroutine[Any, Any, None], stop: Stop, *, num_threads: int) -> None:
    """Runs `work` until it ends or `stop` is set; each of its ranges needs one thread at a time."""
    threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-download")
    asyncio.get_running_loop().set_default_executor(threads)
    task = asyncio.create_task(work)
    while not task.done():
        if stop.is_set():
            task.cancel()
        await asyncio.wait({task}, timeout=_STOP_POLL_S)
    if task.cancelled():
        raise DownloadStoppedError("download stopped on request")
    task.result()


class _Download:
    def __init__(self, chunks: Chunks, wanted: Iterable[int], patience: RetryPolicy, tally: DownloadStats) -> None:
        self.tally = tally
        self._chunks = chunks
        self._missing = collections.deque(sorted(wanted))
        self._num_bad: collections.Counter[int] = collections.Counter()
        self._patience = patience
        self._arrived_s = time.monotonic()
        # Limits the span so that all ranges have work, even with few or small chunks.
        fair = -(-chunks.num // patience.num_ranges)
        self._max_span = max(1, min(fair, patience.range_bytes * chunks.num // max(1, chunks.num_bytes)))
        self._width, self._span = patience.num_ranges, self._max_span
        """Current number of concurrent ranges and of chunks per range."""

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
                    logging.warning(
                        "snapshot source failed url=%s chunks_left=%d reason=%s", url, len(self._missing), e
                    )
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
            raise SupersededError(f"no source has it any more: {reasons}")
        silent_s = time.monotonic() - self._arrived_s
        if not left or silent_s >= self._patience.give_up_s:
            num_there = self._chunks.num - len(self._missing)
            since = "" if not left else f" for {silent_s:.0f} s"
            raise (UnreachableError if left or not why else SnapshotError)(
                f"download failed{since}, {num_there} of {self._chunks.num} chunks downloaded: {reasons}"
            )

    async def _read_from(self, place: ObjectSource) -> None:
        """Reads ranges until no chunk is missing. After a failure, running ranges are completed."""
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
            if running:  # so that no task outlives the event loop
                await asyncio.wait(running)
        if failure is not None:
            raise failure

    def _take(self) -> list[int]:
        taken = [self._missing.popleft()]
        where = self._chunks.where
        while self._missing and where(self._missing[0])[0] == where(taken[-1])[1] and len(taken) < self._span:
            taken.append(self._missing.popleft())
        return taken

    async def _read_range(self, place: ObjectSource, chunks: list[int]) -> None:
        """Reads contiguous chunks; unread ones are missing again afterwards."""
        where = self._chunks.where
        begin, end = where(chunks[0])[0], where(chunks[-1])[1]
        position = begin
        waiting = collections.deque(chunks)
        try:
            room = self._chunks.room(begin, end)
            self.tally.num_requests += 1
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
        if await asyncio.to_thread(self._chunks.accept, chunk, received):
            self._arrived_s = time.monotonic()
            return
        self.tally.num_bad += 1
        self._num_bad[chunk] += 1
        self._missing.append(chunk)
        message = f"chunk {chunk} does not match its hash"
        if self._num_bad[chunk] >= self._patience.max_bad:
            self._num_bad[chunk] = 0  # another source may have a correct copy
            raise SourceRefusedError(f"corrupt: {message}, {self._patience.max_bad} times")
        logging.warning("snapshot %s; fetching it again", message)
