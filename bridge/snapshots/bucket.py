"""Versions in a bucket (S3, GCS, a folder): for actors that don't reach the learner, or too many of them for its link.

    v1/RUN/INCARNATION:STEP/slot-0      the data, as it lies in the learner's memory
    v1/RUN/INCARNATION:STEP/delta-0     where there is one
    v1/RUN/INCARNATION:STEP/manifest    put last: a version without it isn't there

Of several learner hosts each puts its own piece; the manifest is put when all are there. A version is deleted the other
way round, its manifest first. The run's learner alone writes here.

What goes up is a copy in memory, made under the slot's lock: the learner's next versions never wait for a bucket.
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
"""Bytes of one part of an upload; S3 takes up to 10,000 parts, and a larger file has larger ones."""
_MAX_PARTS = 9_000
_MAX_CONCURRENCY = 8
_ATTEMPTS = 3
_BACKOFF_S = 1.0
_MAX_RETRIES = 5


@dataclasses.dataclass(slots=True)
class BucketVersion:
    """What a bucket has of one version."""

    names: set[str] = dataclasses.field(default_factory=set[str])

    @property
    def is_whole(self) -> bool:
        """Whether its manifest was put, which is done last."""
        return MANIFEST in self.names


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A piece's bytes, ours alone."""

    piece: ShardEntry
    data: memoryview
    delta: bytes


class SnapshotBucket:
    """Puts a run's versions into a bucket and deletes old ones. Not for several threads at once."""

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
        """Asks nothing of the bucket yet.

        Args:
          url: s3://bucket/prefix, gs://bucket/prefix or file:///folder.
          folder: where the learner publishes; a slot is locked against its writer while it is copied.
          run: the run's id.
          keep: versions that stay, besides one that the delta of a kept one leads from.
          host: which of the learner's processes this is: whose pieces it puts there.
          timeout_s: how long one request may take.
          max_retries: how often a request is made again before the attempt counts as failed.
          part_bytes: what is sent in one request.
          pause: waits between attempts, in seconds.

        Raises:
          ValueError: a URL that is no bucket's.
        """
        if urllib.parse.urlsplit(url).scheme not in BUCKET_SCHEMES:
            raise ValueError(f"a bucket is s3://..., gs://... or file:///..., got {url}")
        if keep < 1:
            raise ValueError(f"at least one version must stay in the bucket, got keep={keep}")
        self._url, self._folder, self._run = url, pathlib.Path(folder), run
        self._keep, self._host, self._part_bytes, self._pause = keep, host, part_bytes, pause
        place = place_of_run(url, run)
        self._place = open_source(place, timeout_s=timeout_s, max_retries=max_retries, is_written=True)
        self._bases: dict[Version, frozenset[Version]] = {}

    def put(self, manifest: WeightManifest) -> tuple[str, ...]:
        """Puts the announced version of a single host there; returns the URL under which it lies.

        Raises:
          SupersededError: a newer one is out, and nothing was put.
          SnapshotError: it did not get there in a few attempts. It may be put again as long as it is announced, and
            the next version goes there all the same.
        """
        self.put_piece(manifest)
        return self.put_manifest(manifest)

    def put_piece(self, manifest: WeightManifest) -> None:
        """Puts this host's piece of the announced version there.

        Raises:
          SupersededError, SnapshotError: as `put`.
        """
        copy = _copied(self._folder, manifest, self._host)
        self._try(manifest.version, lambda: self._put_piece(manifest.version, copy))

    def put_manifest(self, manifest: WeightManifest) -> tuple[str, ...]:
        """Makes a version whole of which all pieces are there, then deletes what is too old; returns its URL.

        Raises:
          SnapshotError: as `put`.
        """
        version, data = manifest.version, codec.encode(manifest)
        self._try(version, lambda: obstore.put(self._place, f"{version}/{MANIFEST}", data))
        self._bases[version] = _bases(manifest)
        try:
            self._delete_old(version)
        except (BaseError, OSError, SnapshotError) as e:  # the next version tries again
            logging.warning("old versions stay in the bucket: %s", first_line(e))
        return (version_url(self._url, self._run, version),)

    def _try(self, version: Version, put: Callable[[], object]) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                put()
                return
            except (BaseError, OSError) as e:
                if attempt + 1 == _ATTEMPTS:
                    raise SnapshotError(
                        f"version {version} did not get into {self._url} in {_ATTEMPTS} attempts: {first_line(e)}"
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
        """Deletes what is too old, and what uploads before `newest` left; a later one is of the next learner."""
        stored = stored_versions(self._place)
        whole = [version for version, objects in stored.items() if objects.is_whole]
        self._bases = {version: self._bases_of(version) for version in whole}
        for version in expired(whole, keep=self._keep, bases_of=self._bases):
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
        """What only a folder keeps of older versions: parts of files, which a listing leaves out, and empty folders."""
        parts = urllib.parse.urlsplit(place_of_run(self._url, self._run))
        if parts.scheme != "file":
            return
        for folder in pathlib.Path(urllib.parse.unquote(parts.path)).iterdir():
            version = _parse(folder.name)
            if version is None or version >= newest or not folder.is_dir() or (folder / MANIFEST).exists():
                continue
            shutil.rmtree(folder)


def place_of_run(url: str, run: str) -> str:
    """The URL under which a run's versions lie in a bucket."""
    return version_url(url, run, Version(incarnation=0, step=0)).rpartition("/")[0]


def stored_versions(run_place: ObjectStore) -> dict[Version, BucketVersion]:
    """What a run has in a bucket, oldest version first; what has another form is left alone.

    Args:
      run_place: `open_source(place_of_run(url, run))`.
    """
    found: dict[Version, BucketVersion] = {}
    # Its other return type is pyarrow's, which isn't here.
    batches: "Iterable[Sequence[ObjectMeta]]" = obstore.list(run_place)  # pyright: ignore[reportUnknownMemberType]
    for batch in batches:
        for item in batch:
            folder, _, name = item["path"].partition("/")
            version = _parse(folder)
            if version is not None and name and "/" not in name:
                found.setdefault(version, BucketVersion()).names.add(name)
    return dict(sorted(found.items()))


def read_bucket_manifest(run_place: ObjectStore, version: Version) -> WeightManifest:
    """A version's manifest, as it lies in the bucket; its signature is yet to be checked.

    Raises:
      SupersededError: the version is not there, or not any more.
      SnapshotError: it is damaged or of another format.
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
        raise SnapshotError(f"the manifest of version {version} can't be read: {e}") from e


def expired(versions: Collection[Version], *, keep: int, bases_of: dict[Version, frozenset[Version]]) -> list[Version]:
    """Versions that may go, oldest first: all but the `keep` newest and what those have deltas against."""
    kept = set(sorted(versions)[-keep:])
    kept |= {base for version in kept for base in bases_of.get(version, ())}
    return sorted(set(versions) - kept)


def _copied(folder: pathlib.Path, manifest: WeightManifest, host: int) -> _Copy:
    """The bytes of a host's piece of the announced version.

    Read under the lock that any reader takes, so they are those of this version.

    Raises:
      SupersededError: a newer one is announced.
    """
    version = manifest.version
    piece = next(piece for piece in manifest.shards if piece.host == host)
    try:
        fd = open_own(folder / piece.file.name, os.O_RDONLY)
    except FileNotFoundError:
        raise SupersededError(f"version {version} is not in memory any more") from None
    try:
        if not try_flock(fd, fcntl.LOCK_SH) or latest(folder) != manifest:
            raise SupersededError(f"version {version} was superseded before it was put into the bucket")
        data = np.empty(piece.file.num_bytes, np.uint8)
        with mmap.mmap(fd, piece.file.num_bytes, prot=mmap.PROT_READ) as slot:
            np.copyto(data, np.frombuffer(slot, np.uint8))  # without Python's lock
        # Written under its slot's lock too.
        delta = (folder / piece.delta.name).read_bytes() if piece.delta is not None else b""
        if piece.delta is not None and len(delta) != piece.delta.num_bytes:
            raise SupersededError(f"the delta of version {version} is not there any more")
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
