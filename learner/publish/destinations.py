"""Destinations of versions outside shared memory: HTTPS server, bucket, and the upload queue of a slow destination."""

import dataclasses
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from bridge.files import first_line
from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, latest
from bridge.weight_types import WeightManifest
from configs.sections import PublishConfig
from learner.distributed.channel import Channel, Processes, ProcessLostError, SingleProcess

_SUPERSEDED = "superseded"
BUCKET_KEEP = 2
"""Number of newest versions to keep in the bucket."""
_UPLOAD_S = 3600.0
"""Timeout of the leader's wait for the other hosts' uploads, in seconds. Each request has its own timeout."""


class BucketDestination:
    """A host's part in uploads to the bucket."""

    def __init__(self, bucket: SnapshotBucket, folder: pathlib.Path, hosts: Processes) -> None:
        """Starts the follower thread on a host that is not the leader."""
        self._bucket, self._folder = bucket, folder
        self._channel: Channel = hosts.channel("bucket")
        self.thread: threading.Thread | None = None
        if not hosts.is_leader:
            self.thread = threading.Thread(target=self._follow, name="bucket", daemon=True)
            self.thread.start()

    def put(self, manifest: WeightManifest) -> Sequence[str]:
        """Uploads the announced version from the leader, all hosts' pieces concurrently; returns its URLs.

        Raises SupersededError if a newer version is published, SnapshotError if the upload of a piece failed, and
        ProcessLostError if a host does not answer.
        """
        self._channel.broadcast(str(manifest.version).encode(), timeout_s=_UPLOAD_S)
        mine = self._put_piece(manifest)
        failures = [said.decode() for said in self._channel.gather(mine.encode(), timeout_s=_UPLOAD_S)]
        if _SUPERSEDED in failures:
            raise SupersededError(f"version {manifest.version} was superseded before its upload to the bucket")
        if any(failures):
            wrong = "; ".join(f"host {i}: {failure}" for i, failure in enumerate(failures) if failure)
            raise SnapshotError(f"version {manifest.version}: upload to the bucket failed: {wrong}")
        return self._bucket.put_manifest(manifest)

    def _follow(self) -> None:
        """Uploads this host's piece of each version that the leader names, until the leader exits."""
        try:
            while True:
                version = Version.parse(self._channel.broadcast(None, timeout_s=math.inf).decode())
                self._channel.gather(self._put_announced(version).encode(), timeout_s=_UPLOAD_S)
        except ProcessLostError as e:  # the learner exits and logs the reason elsewhere
            logging.info("bucket uploads ended: %s", e)

    def _put_announced(self, version: Version) -> str:
        try:
            manifest = latest(self._folder)
        except SnapshotError as e:
            return str(e)
        return self._put_piece(manifest) if manifest is not None and manifest.version == version else _SUPERSEDED

    def _put_piece(self, manifest: WeightManifest) -> str:
        """Uploads this host's piece; returns the failure, or an empty string."""
        try:
            self._bucket.put_piece(manifest)
        except SupersededError:
            return _SUPERSEDED
        except Exception as e:  # reported to the leader, which retries
            return first_line(e)
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """Place in which other machines can fetch versions: the table of a server, or a bucket."""

    name: str
    put: Callable[[WeightManifest], Sequence[str]]
    """Stores a version that is complete in shared memory and returns its URLs; may raise any exception. Unless
    `is_slow`, the version does not change during the call."""
    is_required: bool = False
    """True if a failure of `put` ends the run. Otherwise the failure is logged and counted, and publishing
    continues."""
    is_slow: bool = False
    """True if `put` may take longer than the interval between versions. A separate thread then calls it with the newest
    version only. It locks what it reads and raises `SupersededError` if a newer version is published. Never
    required."""


_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 5.0
"""Longest pause before a failed upload is retried, in seconds."""


class UploadQueue:
    """Uploads of versions to one destination, one at a time; retries each until it succeeds or a newer version waits.

    Retries are necessary: actors that reach only this destination may wait for this version, and the learner for their
    samples. A lost host ends the queue, because its late reply would be read as the reply about the next version.
    """

    def __init__(
        self,
        destination: Destination,
        on_stored: Callable[[WeightManifest, Sequence[str]], None],
        on_lost: Callable[[ProcessLostError], None],
    ) -> None:
        """Creates an idle queue; its thread starts with the first `put`.

        The thread calls `on_stored` with each stored version and its URLs, which must not raise, and `on_lost` when a
        host is lost. It then uploads no further version.
        """
        self.destination, self._on_there, self._on_lost = destination, on_stored, on_lost
        self.num_replaced = 0
        """Versions that were not stored because a newer version replaced them."""
        self.num_failures = 0
        self.unsent_version: Version | None = None
        """Newest version of `put` that is not stored: waiting, in progress, to be retried, or abandoned."""
        self._changed = threading.Condition()
        self._next: WeightManifest | None = None
        self._is_putting = self._is_closing = False
        self._thread: threading.Thread | None = None

    def put(self, manifest: WeightManifest) -> None:
        """Queues a version that is announced in shared memory; returns immediately."""
        with self._changed:
            if self._next is not None:
                self._replaced(self._next)
            self._next, self.unsent_version = manifest, manifest.version
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.destination.name, daemon=True)
            self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if a version waits, is in progress or will be retried."""
        with self._changed:
            return self._next is not None or self._is_putting

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for uploads in progress and starts no further one; logs a version not stored."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and not self._is_putting, timeout_s)
            self._is_closing, self._next = True, None
            self._changed.notify_all()
        if self.unsent_version is not None:
            logging.warning("publish abandoned destination=%s version=%s", self.destination.name, self.unsent_version)

    def _replaced(self, manifest: WeightManifest) -> None:
        self.num_replaced += 1
        logging.warning("publish replaced destination=%s version=%s", self.destination.name, manifest.version)

    def _run(self) -> None:
        while (manifest := self._begin()) is not None:
            try:
                sources = self._put(manifest)
                if sources is not None and not self._is_closing:
                    self._on_there(manifest, sources)
            except ProcessLostError as e:
                logging.error(
                    "publish ended destination=%s version=%s reason=%s", self.destination.name, manifest.version, e
                )
                self._on_lost(e)
                return
            finally:
                with self._changed:
                    self._is_putting = False
                    self._changed.notify_all()

    def _begin(self) -> WeightManifest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_closing)
            manifest, self._next = self._next, None
            self._is_putting = manifest is not None
            return manifest

    def _put(self, manifest: WeightManifest) -> Sequence[str] | None:
        """Uploads a version with retries; returns its URLs, or None if a newer one replaces it or the queue closes."""
        pauses_s = _pauses()
        while True:
            try:
                sources = self.destination.put(manifest)
            except SupersededError:
                with self._changed:
                    self._replaced(manifest)
                return None
            except ProcessLostError:
                raise
            except Exception as e:
                self.num_failures += 1
                logging.error(
                    "publish failed destination=%s version=%s reason=%s", self.destination.name, manifest.version, e
                )
            else:
                with self._changed:
                    if self.unsent_version == manifest.version:
                        self.unsent_version = None
                return sources
            if self._gives_way(manifest, next(pauses_s)):  # not in `except`: the error would hold a copy of the version
                return None

    def _gives_way(self, manifest: WeightManifest, pause_s: float) -> bool:
        """Waits before a retry; returns True if a newer version waits or the queue closes, so that no retry follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_closing, pause_s)
            if self._next is not None:
                self._replaced(manifest)
            return self._next is not None or self._is_closing


def _pauses() -> Iterator[float]:
    """Yields the seconds to wait before the second attempt, the third and so on, without end."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def destinations_of(
    config: PublishConfig, folder: pathlib.Path, *, run: str, hosts: Processes | None = None
) -> list[Destination]:
    """Returns the configured destinations, at most one bucket; other hosts than the leader follow it and return none.

    Raises ValueError if publish.bucket is not the URL of a bucket.
    """
    if not config.bucket:
        return []
    hosts = hosts or SingleProcess()
    bucket = SnapshotBucket(config.bucket, folder, run=run, keep=BUCKET_KEEP, host=hosts.index)
    of_all = BucketDestination(bucket, folder, hosts)
    return [Destination(name="bucket", put=of_all.put, is_slow=True)] if hosts.is_leader else []
