"""Snapshots in a bucket (S3, GCS, a folder), for actors that cannot reach the learner or would overload its network.

    v1/RUN/INCARNATION:STEP/slot-0      data, as in the learner's memory
    v1/RUN/INCARNATION:STEP/delta-0     delta, if there is one
    v1/RUN/INCARNATION:STEP/manifest    put last: a version without a manifest is incomplete

Each of several learner hosts puts its own shard, and the manifest follows when all shards are stored. To delete a
version, its manifest goes first. Only the run's learner writes here.

An upload reads a copy in memory, made under the slot's lock, so the learner's next versions never wait for a bucket.
"""

import dataclasses
import fcntl
import mmap
import os
import pathlib
import shutil
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import obstore
from absl import logging
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from bridge import codec
from bridge.files import first_line, open_own, try_flock
from bridge.object_store import BUCKET_SCHEMES, open_source
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import MANIFEST, SnapshotError, SupersededError, latest, version_url
from bridge.weight_types import ShardEntry, WeightManifest

if TYPE_CHECKING:
    from obstore import ObjectMeta

PART_BYTES = 8 * 2**20
"""Bytes per part of an upload. S3 allows 10,000 parts, so larger files have larger parts."""
_MAX_PARTS = 9_000
_MAX_CONCURRENCY = 8
_ATTEMPTS = 3
_BACKOFF_S = 1.0
_MAX_RETRIES = 5


@dataclasses.dataclass(slots=True)
class BucketVersion:
    """Objects of one version in a bucket."""

    names: set[str] = dataclasses.field(default_factory=set[str])

    @property
    def is_whole(self) -> bool:
        """True if the manifest, which is put last, exists."""
        return MANIFEST in self.names


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    piece: ShardEntry
    data: memoryview
    delta: bytes


class SnapshotBucket:
    """Uploader of a run's versions, which also deletes old ones. Not thread-safe."""

    def __init__(
        self,
        url: str,
        folder: str | os.PathLike[str],
        *,
        run: str,
        keep: int,
        host: int = 0,
        timeout_s: float = 60.0,
        max_retries: int = _MAX_RETRIES,
        part_bytes: int = PART_BYTES,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects lazily: sends no request. Raises ValueError if the URL is not a bucket's, or `keep` is below 1.

        Args:
          folder: the learner's snapshot folder; a slot is locked against its writer while it is copied.
          keep: number of newest versions that stay, in addition to the bases of their deltas.
          host: index of this learner process, whose shards it puts.
          max_retries: retries of a request before the attempt fails.
        """
        if urllib.parse.urlsplit(url).scheme not in BUCKET_SCHEMES:
            raise ValueError(f"bucket: expected s3://..., gs://... or file:///..., got {url}")
        if keep < 1:
            raise ValueError(f"bucket: keep must be >= 1, got {keep}")
        self._url, self._folder, self._run = url, pathlib.Path(folder), run
        self._keep, self._host, self._part_bytes, self._pause = keep, host, part_bytes, pause
        place = place_of_run(url, run)
        self._place = open_source(place, timeout_s=timeout_s, max_retries=max_retries, is_written=True)
        self._bases: dict[Version, frozenset[Version]] = {}

    def put_piece(self, manifest: WeightManifest) -> None:
        """Puts this host's shard of the announced version.

        Raises SupersededError if a newer version was announced; nothing was put. Raises SnapshotError if the upload
        failed in several attempts. It may be retried while the version is announced.
        """
        copy = _copied(self._folder, manifest, self._host)
        self._try(manifest.version, lambda: self._put_piece(manifest.version, copy))

    def put_manifest(self, manifest: WeightManifest) -> tuple[str, ...]:
        """Completes a version with all shards stored, deletes old ones, and returns its URL. Raises as `put_piece`."""
        version, data = manifest.version, codec.encode(manifest)
        self._try(version, lambda: obstore.put(self._place, f"{version}/{MANIFEST}", data))
        self._bases[version] = _bases(manifest)
        try:
            self._delete_old(version)
        except (BaseError, OSError, SnapshotError) as e:  # the next version tries again
            logging.warning("old versions not deleted from the bucket: %s", first_line(e))
        return (version_url(self._url, self._run, version),)

    def _try(self, version: Version, put: Callable[[], object]) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                put()
                return
            except (BaseError, OSError) as e:
                if attempt + 1 == _ATTEMPTS:
                    raise SnapshotError(
                        f"version {version}: upload to {self._url} failed after {_ATTEMPTS} attempts: {first_line(e)}"
                    ) from None
                logging.warning("upload failed version=%s attempt=%d: %s", version, attempt + 1, first_line(e))
                self._pause(_BACKOFF_S * 2**attempt)

    def _put_piece(self, version: Version, copy: _Copy) -> None:
        self._put_data(f"{version}/{copy.piece.file.name}", copy.data)
        if copy.piece.delta is not None:
            obstore.put(self._place, f"{version}/{copy.piece.delta.name}", copy.delta)

    def _put_data(self, key: str, data: memoryview) -> None:
        part_bytes = self._part_bytes
        while len(data) > part_bytes * _MAX_PARTS:
            part_bytes *= 2
        parts = (data[i : i + part_bytes] for i in range(0, len(data), part_bytes))
        obstore.put(
            self._place, key, parts, use_multipart=True, chunk_size=part_bytes, max_concurrency=_MAX_CONCURRENCY
        )

    def _delete_old(self, newest: Version) -> None:
        """Deletes versions over the bound or incomplete, but none after `newest`.

        Later ones belong to the next learner, or to one whose store was replaced by an older copy.
        """
        stored = stored_versions(self._place)
        whole = [version for version, objects in stored.items() if objects.is_whole]
        self._bases = {version: self._bases_of(version) for version in whole}
        until_newest = [version for version in whole if version <= newest]
        for version in expired(until_newest, keep=self._keep, bases_of=self._bases):
            self._delete(version, stored[version])
        for version, objects in stored.items():  # left by uploads that were killed
            if not objects.is_whole and version < newest:
                self._delete(version, objects)
        self._delete_part_files(newest)

    def _bases_of(self, version: Version) -> frozenset[Version]:
        if version not in self._bases:
            return _bases(read_bucket_manifest(self._place, version))
        return self._bases[version]

    def _delete(self, version: Version, objects: BucketVersion) -> None:
        if objects.is_whole:
            obstore.delete(self._place, f"{version}/{MANIFEST}")
        keys = [f"{version}/{name}" for name in sorted(objects.names - {MANIFEST})]
        if keys:
            obstore.delete(self._place, keys)
        self._bases.pop(version, None)

    def _delete_part_files(self, newest: Version) -> None:
        """Deletes remains of older versions in a folder that a listing omits: partial files and empty folders."""
        parts = urllib.parse.urlsplit(place_of_run(self._url, self._run))
        if parts.scheme != "file":
            return
        for folder in pathlib.Path(urllib.parse.unquote(parts.path)).iterdir():
            version = _parse(folder.name)
            if version is None or version >= newest or not folder.is_dir() or (folder / MANIFEST).exists():
                continue
            shutil.rmtree(folder)


def place_of_run(url: str, run: str) -> str:
    """Returns the URL of a run's versions in a bucket."""
    return version_url(url, run, Version(incarnation=0, step=0)).rpartition("/")[0]


def stored_versions(run_place: ObjectStore) -> dict[Version, BucketVersion]:
    """Returns a run's versions at `open_source(place_of_run(url, run))`, oldest first; ignores other objects."""
    found: dict[Version, BucketVersion] = {}
    # Its other return type needs pyarrow, which is not installed.
    batches: "Iterable[Sequence[ObjectMeta]]" = obstore.list(run_place)  # pyright: ignore[reportUnknownMemberType]
    for batch in batches:
        for item in batch:
            folder, _, name = item["path"].partition("/")
            version = _parse(folder)
            if version is not None and name and "/" not in name:
                found.setdefault(version, BucketVersion()).names.add(name)
    return dict(sorted(found.items()))


def read_bucket_manifest(run_place: ObjectStore, version: Version) -> WeightManifest:
    """Returns a version's manifest from the bucket. The caller must check its signature.

    Raises SupersededError if the bucket lacks the version, and SnapshotError if the manifest is corrupt or has another
    format.
    """
    key = f"{version}/{MANIFEST}"
    try:
        size = obstore.head(run_place, key)["size"]
        if size > codec.MAX_BYTES:
            raise SnapshotError(f"the manifest of version {version} has {size} bytes, the limit is {codec.MAX_BYTES}")
        data = obstore.get_range(run_place, key, start=0, length=size)
    except FileNotFoundError as e:
        raise SupersededError(f"version {version} is not in the bucket: {first_line(e)}") from e
    try:
        return codec.decode(WeightManifest, bytes(data))
    except ValueError as e:
        raise SnapshotError(f"the manifest of version {version} cannot be read: {e}") from e


def expired(versions: Collection[Version], *, keep: int, bases_of: dict[Version, frozenset[Version]]) -> list[Version]:
    """Returns the versions to delete, oldest first: all but the `keep` newest and the bases of their deltas."""
    kept = set(sorted(versions)[-keep:])
    kept |= {base for version in kept for base in bases_of.get(version, ())}
    return sorted(set(versions) - kept)


def _copied(folder: pathlib.Path, manifest: WeightManifest, host: int) -> _Copy:
    """Copies a host's shard under the lock that readers take. Raises SupersededError after a newer announcement."""
    version = manifest.version
    piece = next(piece for piece in manifest.shards if piece.host == host)
    try:
        fd = open_own(folder / piece.file.name, os.O_RDONLY)
    except FileNotFoundError:
        raise SupersededError(f"version {version} is no longer in memory") from None
    try:
        if not try_flock(fd, fcntl.LOCK_SH) or latest(folder) != manifest:
            raise SupersededError(f"version {version} was superseded before its upload to the bucket")
        data = np.empty(piece.file.num_bytes, np.uint8)
        with mmap.mmap(fd, piece.file.num_bytes, prot=mmap.PROT_READ) as slot:
            np.copyto(data, np.frombuffer(slot, np.uint8))  # releases Python's global lock
        # The delta is also written under its slot's lock.
        delta = (folder / piece.delta.name).read_bytes() if piece.delta is not None else b""
        if piece.delta is not None and len(delta) != piece.delta.num_bytes:
            raise SupersededError(f"the delta of version {version} no longer exists")
        return _Copy(piece, data.data, delta)
    finally:
        os.close(fd)


def _bases(manifest: WeightManifest) -> frozenset[Version]:
    return frozenset(piece.delta.base_version for piece in manifest.shards if piece.delta is not None)


def _parse(name: str) -> Version | None:
    try:
        return Version.parse(name)
    except ValueError:
        return None
