"""A bucket that all of the learner's hosts put their pieces into: the leader says which version, and makes it whole."""

import math
import pathlib
import threading
from collections.abc import Sequence

from absl import logging

from bridge.files import first_line
from bridge.published import WeightManifest
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.layout import SnapshotError, SupersededError, latest
from bridge.types import Version
from learner.hosts.hosts import Channel, HostLostError, Hosts

_SUPERSEDED = "superseded"
_UPLOAD_S = 3600.0
"""How long the leader waits for the other hosts' uploads; each request has a bound of its own."""


class BucketHosts:
    """One host's part in it."""

    def __init__(self, bucket: SnapshotBucket, folder: pathlib.Path, hosts: Hosts) -> None:
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
          HostLostError: a host does not answer.
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
        except HostLostError as e:  # the learner ends, and says why elsewhere
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
