"""Large groups as bucket objects (claim check pattern): the database row holds only a reference.

An object is put before its row and deleted after it, so a row always finds its object. Objects left by a process that
dies in between are swept. Object names are derived from the ticket's id and never read from a row, so a reference
cannot point to another ticket's object. No name is used twice, so an old object without a row can be deleted safely.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import re
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import blake3
import obstore
import obstore.exceptions as obstore_errors
from absl import logging
from obstore.store import ObjectStore

from bridge.files import first_line
from bridge.object_store import open_source
from bridge.store.store_types import StoreLostError

T = TypeVar("T")
_REFERENCE = re.compile(r"([0-9a-f]{32}):([0-9]{1,12}):([0-9a-f]{64})")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_AT_ONCE = 8
"""Objects fetched or deleted concurrently; each takes a round trip."""
_CLOCK = ".clock"
"""Object that is written to read the bucket's own time."""
_MARK = ".run"
"""Object that the learner puts, by which actors verify that they use the learner's bucket."""
_GONE = FileNotFoundError
_REFUSED = (
    PermissionError,
    obstore_errors.PermissionDeniedError,
    obstore_errors.UnauthenticatedError,
    obstore_errors.InvalidPathError,
    obstore_errors.NotSupportedError,
)


class BadBlobError(ValueError):
    """Error for a referenced object that is missing, or has another size or content than was put."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlobReference:
    """Reference to an object, stored in a row instead of a group."""

    nonce: str
    num_bytes: int
    blake3: str

    def __str__(self) -> str:
        return f"{self.nonce}:{self.num_bytes}:{self.blake3}"

    @classmethod
    def parse(cls, text: str) -> "BlobReference":
        """Parses the form stored in a row. Raises BadBlobError if the text is not a reference."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise BadBlobError(f"object reference: expected nonce:bytes:blake3, got {text[:200]!r}")
        return cls(match[1], int(match[2]), match[3])


class GroupBlobs:
    """Groups of one run in a bucket. Thread-safe.

    Transient failures are retried for `retry_s`, followed by StoreLostError. If the bucket rejects a request
    (credentials, rights), the call raises ValueError immediately.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        max_bytes: int,
        retry_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects lazily: sends no request. Raises ValueError if the scheme is not supported."""
        if urllib.parse.urlsplit(url).scheme in ("http", "https"):
            raise ValueError(f"store.bucket: expected s3://, gs:// or file:///, got {url}")
        self._place: ObjectStore = open_source(url, is_written=True)
        self._url, self._max_bytes, self._retry_s = url, max_bytes, retry_s
        self._run, self._prefix = run, f"groups/{urllib.parse.quote(run, safe='')}"
        self._clock, self._sleep = clock, sleep
        self._threads = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="group-objects")
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        """Cumulative number of objects put, fetched, deleted, swept and bad."""

    @property
    def min_age_s(self) -> float:
        """Minimum age of a swept object, in seconds. A younger object's owner may still be retrying to put its row."""
        return 2 * self._retry_s + 60.0

    def mark(self) -> None:
        """Puts the object that `check_mark` looks for. The learner calls it before any actor can see the run."""
        name = f"{self._prefix}/{_MARK}"
        self._try(lambda: obstore.put(self._place, name, self._run.encode()), f"put {name}")

    def check_mark(self) -> None:
        """Raises ValueError if this bucket is not the one that the learner reads, or rejects the request."""
        if not self._is_marked():
            raise ValueError(
                f"store.bucket={self._url} is not the learner's bucket on this machine ({self._prefix}/{_MARK} is "
                "missing), so large groups would not reach the learner. Use one bucket on all machines (s3://, gs://, "
                "a shared folder), or unset store.bucket at the learner."
            )

    def check_own_mark(self) -> None:
        """Raises ValueError if the learner's own mark is missing, for example in an unmounted shared folder."""
        if not self._is_marked():
            raise ValueError(
                f"store.bucket={self._url} has lost the learner's objects ({self._prefix}/{_MARK} is missing). Mount "
                "the folder, or restore the bucket's contents, and restart the learner. Groups stay in the store, and "
                "a run must keep its bucket while groups refer to it."
            )

    def _is_marked(self) -> bool:
        name = f"{self._prefix}/{_MARK}"
        try:
            self._try(lambda: obstore.head(self._place, name), f"get {name}")
        except _GONE:
            return False
        return True

    def put(self, ticket_id: str, message: bytes) -> BlobReference:
        """Puts a group's message under a new name."""
        if len(message) > self._max_bytes:
            raise ValueError(
                f"ticket {ticket_id}: a group must have at most {self._max_bytes} bytes, got {len(message)}"
            )
        reference = BlobReference(secrets.token_hex(16), len(message), blake3.blake3(message).hexdigest())
        name = self._name(ticket_id, reference.nonce)
        self._try(lambda: obstore.put(self._place, name, message), f"put {name}")
        self._count("put")
        return reference

    def fetch(self, ticket_id: str, reference: str) -> bytes:
        """Returns the message of a reference. Raises BadBlobError if the object is missing or has other content."""
        try:
            wanted = BlobReference.parse(reference)
            if wanted.num_bytes > self._max_bytes:
                raise BadBlobError(f"object must have at most {self._max_bytes} bytes, got {wanted.num_bytes}")
            name = self._name(ticket_id, wanted.nonce)
            message = self._try(lambda: self._get(name, wanted.num_bytes), f"get {name}")
            if blake3.blake3(message).hexdigest() != wanted.blake3:
                raise BadBlobError(f"{name}: its content differs from what was stored (BLAKE3)")
        except _GONE:
            self._count("bad")
            raise BadBlobError(
                f"ticket {ticket_id}: its object is not in {self._url}; check that all machines use the same bucket"
            ) from None
        except BadBlobError as e:
            self._count("bad")
            raise BadBlobError(f"ticket {ticket_id}: {e}") from None
        self._count("fetched")
        return message

    def fetch_all(self, rows: Sequence[tuple[str, str]]) -> list[bytes | BadBlobError]:
        """Fetches all (ticket id, reference) rows concurrently; returns an error in place of a bad object."""

        def fetch(row: tuple[str, str]) -> bytes | BadBlobError:
            try:
                return self.fetch(*row)
            except BadBlobError as e:
                return e

        return list(self._threads.map(fetch, rows))

    def delete(self, rows: Iterable[tuple[str, str]]) -> None:
        """Deletes the objects of permanently deleted rows; leaves failed deletions to `sweep`."""

        def delete(row: tuple[str, str]) -> None:
            try:
                obstore.delete(self._place, self._name(row[0], BlobReference.parse(row[1]).nonce))
            except (BadBlobError, _GONE):
                return
            except (obstore_errors.BaseError, OSError) as e:
                logging.warning("object not deleted ticket=%s error=%s", row[0], first_line(e))
                return
            self._count("deleted")

        list(self._threads.map(delete, rows))

    def sweep(self, referenced: Callable[[], Collection[tuple[str, str]]]) -> int:
        """Deletes old objects without a row; returns their number.

        `referenced` returns (ticket id, reference) of all rows; it is called after the objects are listed.
        """
        now = self._now()
        oldest = now - datetime.timedelta(seconds=self.min_age_s)
        old = self._try(lambda: self._list_before(oldest), f"list {self._prefix}")
        if not old:
            return 0
        wanted = {self._name(ticket_id, text.partition(":")[0]) for ticket_id, text in referenced()}
        orphans = [name for name in old if name not in wanted]
        if orphans:
            self._try(lambda: self._delete(orphans), f"sweep {self._prefix}")
            self._count("swept", len(orphans))
            logging.info("orphaned objects deleted num=%d bucket=%s", len(orphans), self._url)
        return len(orphans)

    def delete_all(self) -> int:
        """Deletes all objects of a dropped run, referenced or not; returns their number."""

        def delete() -> int:
            entries = self._place.list(self._prefix)  # pyright: ignore[reportUnknownMemberType]  # Arrow's types
            names = [entry["path"] for chunk in entries for entry in chunk]
            self._delete(names)
            return sum(not name.endswith(_CLOCK) for name in names)

        return self._try(delete, f"delete {self._prefix}")

    def close(self) -> None:
        """Waits for running requests."""
        self._threads.shutdown()

    def _name(self, ticket_id: str, nonce: str) -> str:
        """Returns the object name of a ticket. The id is hashed, since it may contain any character."""
        return f"{self._prefix}/{blake3.blake3(ticket_id.encode()).hexdigest()[:32]}-{nonce}"

    def _get(self, name: str, num_bytes: int) -> bytes:
        result = obstore.get(self._place, name)
        if result.meta["size"] != num_bytes:
            raise BadBlobError(f"{name}: expected {num_bytes} bytes, got {result.meta['size']}")
        return bytes(result.bytes())

    def _list_before(self, time_: datetime.datetime) -> list[str]:
        chunks = self._place.list(self._prefix)  # pyright: ignore[reportUnknownMemberType]  # Arrow's types
        return [
            entry["path"]
            for chunk in chunks
            for entry in chunk
            if entry["last_modified"] < time_ and not entry["path"].endswith((_CLOCK, _MARK))
        ]

    def _now(self) -> datetime.datetime:
        """Returns the bucket's own time, so that ages are differences of one clock."""
        name = f"{self._prefix}/{_CLOCK}"

        def ask() -> datetime.datetime:
            obstore.put(self._place, name, b"")
            return obstore.head(self._place, name)["last_modified"]

        return self._try(ask, f"put {name}")

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(_GONE):
                obstore.delete(self._place, name)

    def _try(self, call: Callable[[], T], what: str) -> T:
        """Returns the result of `call`, which is retried while it fails transiently."""
        end_s, wait_s = self._clock() + self._retry_s, _FIRST_WAIT_S
        while True:
            try:
                return call()
            except _GONE:
                raise
            except _REFUSED as e:
                raise ValueError(f"store.bucket={self._url}: permission denied to {what}: {first_line(e)}") from None
            except (obstore_errors.BaseError, OSError) as e:
                if self._clock() + wait_s > end_s:
                    said = f"{self._url} could not be reached for {self._retry_s:g} s ({what}): {first_line(e)}"
                    raise StoreLostError(said) from None
                logging.log_every_n_seconds(
                    logging.WARNING, "bucket request retried what=%s error=%s", 10, what, first_line(e)
                )
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _count(self, what: str, num: int = 1) -> None:
        with self._lock:
            self.counts[what] += num
