"""Large groups as objects of a bucket (the claim check pattern): the database's row holds a reference, no data.

An object is put before its row and deleted after it, so a row always finds its object; what is left when a process dies
in between is swept. Names are made here from the ticket's id and never read from a row, and none is used twice: so a
reference can't point to another ticket's object, and what nobody refers to after a while never will be.
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
"""Objects fetched or deleted side by side: each takes a round trip."""
_CLOCK = ".clock"
"""An object that is written to read the bucket's own time."""
_MARK = ".run"
"""An object that the learner puts, by which actors tell that its bucket is theirs."""
_GONE = FileNotFoundError
_REFUSED = (
    PermissionError,
    obstore_errors.PermissionDeniedError,
    obstore_errors.UnauthenticatedError,
    obstore_errors.InvalidPathError,
    obstore_errors.NotSupportedError,
)


class BadBlobError(ValueError):
    """What a reference leads to is not what was put: gone, of another size, or of other bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlobReference:
    """What a row holds in place of a group."""

    nonce: str
    num_bytes: int
    blake3: str

    def __str__(self) -> str:
        """As it stands in a row."""
        return f"{self.nonce}:{self.num_bytes}:{self.blake3}"

    @classmethod
    def parse(cls, text: str) -> "BlobReference":
        """Reads what a row holds.

        Raises:
          BadBlobError: it is no reference.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise BadBlobError(f"a reference to an object reads nonce:bytes:blake3, got {text[:200]!r}")
        return cls(match[1], int(match[2]), match[3])


class GroupBlobs:
    """One run's groups in a bucket; safe to use from several threads.

    Whatever fails on the way to the bucket is tried again for `retry_s`, then `StoreLostError`; what the bucket refuses
    (credentials, rights) is a ValueError at once.
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
        """Asks nothing of the bucket yet.

        Args:
          url: s3://bucket/prefix, gs://bucket/prefix or file:///folder.
          run: whose groups; runs of one bucket keep apart.
          max_bytes: of an object; a larger one is refused before it is fetched.
          retry_s: how long what fails is tried again. An object is swept when it is older than twice that.
          clock: monotonic, in seconds.
          sleep: waits so many seconds.

        Raises:
          ValueError: another scheme.
        """
        if urllib.parse.urlsplit(url).scheme in ("http", "https"):
            raise ValueError(f"store.bucket={url} can't be written to; wanted s3://, gs:// or file:///")
        self._place: ObjectStore = open_source(url, is_written=True)
        self._url, self._max_bytes, self._retry_s = url, max_bytes, retry_s
        self._run, self._prefix = run, f"groups/{urllib.parse.quote(run, safe='')}"
        self._clock, self._sleep = clock, sleep
        self._threads = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="group-objects")
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        """Objects put, fetched, deleted, swept and bad, since the start."""

    @property
    def min_age_s(self) -> float:
        """What is younger is not swept: whoever put it may still be trying to put its row."""
        return 2 * self._retry_s + 60.0

    def mark(self) -> None:
        """Puts what `check_mark` looks for; the learner's, before any actor is told of the run."""
        name = f"{self._prefix}/{_MARK}"
        self._try(lambda: obstore.put(self._place, name, self._run.encode()), f"put {name}")

    def check_mark(self) -> None:
        """Looks whether this bucket is the very one that the learner reads.

        Raises:
          ValueError: it is another one, as a folder of another machine is; or it refuses us.
        """
        if not self._is_marked():
            raise ValueError(
                f"store.bucket={self._url} is not the learner's bucket here ({self._prefix}/{_MARK} is missing), so no "
                "large group would reach it: give all machines one bucket (s3://, gs://, a shared folder), or the "
                "learner none"
            )

    def check_own_mark(self) -> None:
        """Looks whether what the learner itself put with `mark` is still there.

        Raises:
          ValueError: it isn't, as in a shared folder that is not mounted any more; or the bucket refuses us.
        """
        if not self._is_marked():
            raise ValueError(
                f"the learner's own store.bucket={self._url} has lost what the learner put there "
                f"({self._prefix}/{_MARK} is missing), so groups that it doesn't find are no actor's fault: mount the "
                "folder, or give the bucket back what it had, and start the learner again; groups stay in the store, "
                "and a run keeps its bucket while any lie there"
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
                f"ticket {ticket_id}: a group has {len(message)} bytes, at most {self._max_bytes} are taken"
            )
        reference = BlobReference(secrets.token_hex(16), len(message), blake3.blake3(message).hexdigest())
        name = self._name(ticket_id, reference.nonce)
        self._try(lambda: obstore.put(self._place, name, message), f"put {name}")
        self._count("put")
        return reference

    def fetch(self, ticket_id: str, reference: str) -> bytes:
        """What was put; its size is compared before it is fetched, its hash after.

        Raises:
          BadBlobError: it is gone, or something else.
        """
        try:
            wanted = BlobReference.parse(reference)
            if wanted.num_bytes > self._max_bytes:
                raise BadBlobError(f"{wanted.num_bytes} bytes are referred to, at most {self._max_bytes} are taken")
            name = self._name(ticket_id, wanted.nonce)
            message = self._try(lambda: self._get(name, wanted.num_bytes), f"get {name}")
            if blake3.blake3(message).hexdigest() != wanted.blake3:
                raise BadBlobError(f"{name} has other bytes than were put (BLAKE3 differs)")
        except _GONE:
            self._count("bad")
            raise BadBlobError(
                f"ticket {ticket_id}: its object is not in {self._url}; do all machines see the same bucket?"
            ) from None
        except BadBlobError as e:
            self._count("bad")
            raise BadBlobError(f"ticket {ticket_id}: {e}") from None
        self._count("fetched")
        return message

    def fetch_all(self, rows: Sequence[tuple[str, str]]) -> list[bytes | BadBlobError]:
        """`fetch` of (ticket id, reference) each, side by side; a bad one's place holds its error."""

        def fetch(row: tuple[str, str]) -> bytes | BadBlobError:
            try:
                return self.fetch(*row)
            except BadBlobError as e:
                return e

        return list(self._threads.map(fetch, rows))

    def delete(self, rows: Iterable[tuple[str, str]]) -> None:
        """Deletes the objects of rows that are gone for good. What can't be deleted now is left to `sweep`."""

        def delete(row: tuple[str, str]) -> None:
            try:
                obstore.delete(self._place, self._name(row[0], BlobReference.parse(row[1]).nonce))
            except (BadBlobError, _GONE):
                return
            except (obstore_errors.BaseError, OSError) as e:
                logging.warning("object_left ticket=%s error=%s", row[0], first_line(e))
                return
            self._count("deleted")

        list(self._threads.map(delete, rows))

    def sweep(self, referenced: Callable[[], Collection[tuple[str, str]]]) -> int:
        """Deletes objects that no row refers to and none will; returns how many.

        Args:
          referenced: the (ticket id, reference) of all rows; asked after the objects are listed.
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
            logging.info("objects_swept num=%d bucket=%s", len(orphans), self._url)
        return len(orphans)

    def delete_all(self) -> int:
        """Deletes all that a run which is dropped has here, whoever refers to it; returns how many objects."""

        def delete() -> int:
            entries = self._place.list(self._prefix)  # pyright: ignore[reportUnknownMemberType]  # Arrow's types
            names = [entry["path"] for chunk in entries for entry in chunk]
            self._delete(names)
            return sum(not name.endswith(_CLOCK) for name in names)

        return self._try(delete, f"delete {self._prefix}")

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown()

    def _name(self, ticket_id: str, nonce: str) -> str:
        """The object of a ticket: its id hashed, since it may hold anything."""
        return f"{self._prefix}/{blake3.blake3(ticket_id.encode()).hexdigest()[:32]}-{nonce}"

    def _get(self, name: str, num_bytes: int) -> bytes:
        result = obstore.get(self._place, name)
        if result.meta["size"] != num_bytes:
            raise BadBlobError(f"{name} has {result.meta['size']} bytes, {num_bytes} were put")
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
        """The bucket's own time: ages are differences of one clock."""
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
        """What `call` returns, made again as long as it fails on the way."""
        end_s, wait_s = self._clock() + self._retry_s, _FIRST_WAIT_S
        while True:
            try:
                return call()
            except _GONE:
                raise
            except _REFUSED as e:
                raise ValueError(f"store.bucket={self._url} refuses to {what}: {first_line(e)}") from None
            except (obstore_errors.BaseError, OSError) as e:
                if self._clock() + wait_s > end_s:
                    said = f"{self._url} could not be reached for {self._retry_s:g} s ({what}): {first_line(e)}"
                    raise StoreLostError(said) from None
                logging.log_every_n_seconds(logging.WARNING, "bucket_retry what=%s error=%s", 10, what, first_line(e))
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _count(self, what: str, num: int = 1) -> None:
        with self._lock:
            self.counts[what] += num
