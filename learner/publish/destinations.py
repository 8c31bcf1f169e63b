"""Where versions also go: HTTPS server, bucket; the retry queue of a slow one."""

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
_UPLOAD_S = 3600.0
"""How long the leader waits for the other hosts' uploads; each request has a bound of its own."""


class BucketDestination:
    """One host's part in it."""

    def __init__(self, bucket: SnapshotBucket, folder: pathlib.Path, hosts: Processes) -> None:
        """Nothing is put yet; a host that does not lead begins to follow.

        Args:
          bucket: this host's.
          folder: where this host publishes.
          hosts: the learner's processes.
        """
        self._bucket, self._folder = bucket, folder
        self._channel: Channel = hosts.channel("bucket")
        self.thread: threading.Thread | None = None
        if not hosts.is_leader:
            self.thread = threading.Thread(target=self._follow, name="bucket", daemon=True)
            self.thread.start()

    def put(self, manifest: WeightManifest) -> Sequence[str]:
        """The leader's: puts the announced version there, the pieces of all hosts at once; the URL where it lies.

        Raises:
          SupersededError: a newer one is out.
          SnapshotError: it did not get there.
          ProcessLostError: a host does not answer.
        """
        self._channel.broadcast(str(manifest.version).encode(), timeout_s=_UPLOAD_S)
        mine = self._put_piece(manifest)
        failures = [said.decode() for said in self._channel.gather(mine.encode(), timeout_s=_UPLOAD_S)]
        if _SUPERSEDED in failures:
            raise SupersededError(f"version {manifest.version} was superseded before it was put into the bucket")
        if any(failures):
            wrong = "; ".join(f"host {i}: {failure}" for i, failure in enumerate(failures) if failure)
            raise SnapshotError(f"version {manifest.version} did not get into the bucket: {wrong}")
        return self._bucket.put_manifest(manifest)

    def _follow(self) -> None:
        """Puts this host's piece of each version that the leader names, until the leader is gone."""
        try:
            while True:
                version = Version.parse(self._channel.broadcast(None, timeout_s=math.inf).decode())
                self._channel.gather(self._put_announced(version).encode(), timeout_s=_UPLOAD_S)
        except ProcessLostError as e:  # the learner ends, and says why elsewhere
            logging.info("bucket no longer followed: %s", e)

    def _put_announced(self, version: Version) -> str:
        try:
            manifest = latest(self._folder)
        except SnapshotError as e:
            return str(e)
        return self._put_piece(manifest) if manifest is not None and manifest.version == version else _SUPERSEDED

    def _put_piece(self, manifest: WeightManifest) -> str:
        """Why this host's piece is not there; empty if it is."""
        try:
            self._bucket.put_piece(manifest)
        except SupersededError:
            return _SUPERSEDED
        except Exception as e:  # whatever it is, the leader hears of it and tries again
            return first_line(e)
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """A way to put versions where other machines can fetch them: a server's table, a bucket."""

    name: str
    """For the log."""
    put: Callable[[WeightManifest], Sequence[str]]
    """Given a version that is whole in shared memory; returns the URLs that it lies under from now on. May raise
    anything. While it is called the version stands still, unless `is_slow`."""
    is_required: bool = False
    """Whether the run ends when it fails. Otherwise that is logged and counted, and the version goes out without it."""
    is_slow: bool = False
    """Whether `put` may take longer than until the next version. It is then called by a thread of its own, for which
    nobody waits, with the newest version alone; it locks what it reads, and raises `SupersededError` where a newer
    version is out already. It is never required."""


_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 5.0
"""The longest pause before a version that failed is put again: a destination that is back has it soon."""


class UploadQueue:
    """Puts versions into one destination, one after the other, each until it is there or a newer one waits.

    One that failed is put again: actors that reach this destination alone may wait for this very version, and the
    learner for them. Then nothing newer comes, however long the destination is back. A lost host ends the queue: those
    left would take what it says late for an answer about the next version.
    """

    def __init__(
        self,
        destination: Destination,
        on_stored: Callable[[WeightManifest, Sequence[str]], None],
        on_lost: Callable[[ProcessLostError], None],
    ) -> None:
        """Nothing is on its way.

        Args:
          destination: where to.
          on_stored: told of each version that is there and its URLs, by the lane's thread; raises nothing.
          on_lost: told of the host whose piece did not come, likewise; nothing goes out any more.
        """
        self.destination, self._on_there, self._on_lost = destination, on_stored, on_lost
        self.num_replaced = 0
        """Versions that did not go there because a newer one was out."""
        self.num_failures = 0
        """Times that a version could not be put there."""
        self.unsent_version: Version | None = None
        """The newest version given, as long as it is not there: on its way, waiting, to be put again or given up."""
        self._changed = threading.Condition()
        self._next: WeightManifest | None = None
        self._is_putting = self._is_closing = False
        self._thread: threading.Thread | None = None

    def put(self, manifest: WeightManifest) -> None:
        """Takes the version that is announced in shared memory; returns at once."""
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
        """Whether a version waits, is on its way or will be put again."""
        with self._changed:
            return self._next is not None or self._is_putting

    def close(self, timeout_s: float) -> None:
        """Waits a bounded time for what is under way; then nothing more is begun. What is not there is said."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and not self._is_putting, timeout_s)
            self._is_closing, self._next = True, None
            self._changed.notify_all()
        if self.unsent_version is not None:
            logging.warning("publish given up destination=%s version=%s", self.destination.name, self.unsent_version)

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
        """Puts it until it is there; the URLs that it lies under now. None if a newer one is out, or all ends.

        Raises:
          ProcessLostError: another host did not say whether its piece is there.
        """
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
            if self._gives_way(manifest, next(pauses_s)):  # out of `except`: the error would hold a copy of the version
                return None

    def _gives_way(self, manifest: WeightManifest, pause_s: float) -> bool:
        """Waits before a version is put again; whether it isn't to be, because a newer one waits or all ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_closing, pause_s)
            if self._next is not None:
                self._replaced(manifest)
            return self._next is not None or self._is_closing


def _pauses() -> Iterator[float]:
    """Seconds before the second attempt, the third and so on, for ever."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def destinations_of(
    config: PublishConfig, folder: pathlib.Path, *, run: str, hosts: Processes | None = None
) -> list[Destination]:
    """The bucket, where there is one; a version that doesn't get there goes out without it.

    Args:
      config: where versions go.
      folder: where the run publishes.
      run: its id.
      hosts: the learner's processes; None: this one alone. One that does not lead puts its pieces there as the leader
        says, and has no destination for it.

    Raises:
      ValueError: publish.bucket is no bucket's URL.
    """
    if not config.bucket:
        return []
    hosts = hosts or SingleProcess()
    bucket = SnapshotBucket(config.bucket, folder, run=run, keep=config.bucket_keep, host=hosts.index)
    of_all = BucketDestination(bucket, folder, hosts)
    return [Destination(name="bucket", put=of_all.put, is_slow=True)] if hosts.is_leader else []
