"""Snapshots from other machines: announced by the store, read from a server or a bucket, verified chunk by chunk.

Everything is checked before the first byte: signatures, run, tokenizer, names, shapes, dtypes, sizes, and that the
hosts' pieces make up the whole file. Then all pieces are fetched at once (`ShardFetch`).
"""

import contextlib
import functools
import pathlib
import threading

import numpy as np
from absl import logging
from obstore.exceptions import BaseError

from bridge import codec
from bridge.credentials import TOKEN_FILE, Tls, Token
from bridge.files import first_line, replace_file
from bridge.object_store import is_of_this_machine, open_source
from bridge.rollout_types import Version
from bridge.snapshots.bucket import read_bucket_manifest
from bridge.snapshots.remote.download import DownloadStats, ObjectSource, RetryPolicy, SourceMissingError
from bridge.snapshots.remote.shard_fetch import MAX_AT_ONCE, ReusableData, ShardFetch, base_in, fetch_all
from bridge.snapshots.shard_map import zero_gaps
from bridge.snapshots.shared_memory import SharedMemoryFile
from bridge.snapshots.snapshot_format import (
    SnapshotBusyError,
    SnapshotError,
    SupersededError,
    TensorTable,
    UnreachableError,
    check_fit,
    check_signature,
    manifest_path,
    older_place,
    own_sources,
    part_path,
    reserve,
    sign,
)
from bridge.weight_types import Announcement, WeightManifest

_MANIFEST_S = 30.0
"""How long each of the two requests for a manifest may take."""
_REQUEST_S = 600.0
"""How long one range may take in all; that blocks keep coming is watched apart (`RetryPolicy.silence_s`)."""


class SnapshotFetcher:
    """Fetches announced versions into warm local files. One thread at a time, `older` and `check` apart."""

    def __init__(
        self,
        *,
        run: str,
        tokenizer_hash: str,
        expected: TensorTable | None = None,
        token: Token | None = None,
        tls: Tls | None = None,
        patience: RetryPolicy | None = None,
        lock_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is opened yet.

        Args:
          run: whose snapshots.
          tokenizer_hash: the model's.
          expected: the model's tensors: a snapshot with other names, dtypes or shapes is refused.
          token: what servers are shown, and announcements and manifests must be signed with; None: neither, and only
            what lies on this machine is fetched.
          tls: whom to trust besides the system's authorities.
          patience: with places that are slow or fail.
          lock_timeout_s: how long a file that somebody maps is waited for.
        """
        self._run, self._tokenizer_hash, self._expected = run, tokenizer_hash, expected
        self._token, self._tls = token, tls
        self._patience = patience or RetryPolicy()
        self._lock_timeout_s = lock_timeout_s
        self._segments: dict[pathlib.Path, SharedMemoryFile] = {}
        self.num_deltas = 0
        """Versions that came by their delta, wholly or in part."""
        self.num_failed_deltas = 0
        """Deltas that did not lead to all of a version, so that the rest was fetched in full."""
        self._tallies: list[DownloadStats] = []

    @property
    def num_arrived_bytes(self) -> int:
        """Of the fetch that is under way, or of the last one; any thread may look whether it grows."""
        return sum(tally.num_bytes for tally in self._tallies)

    def check(self, announcement: Announcement) -> None:
        """Refuses what may not be fetched, before anything is allocated or read, and any source is asked.

        Raises:
          SnapshotError: unsigned or signed by another, on another machine and nobody vouches for it here, another run,
            tokenizer or model, or malformed.
        """
        manifest = announcement.manifest
        if self._token is not None:
            check_signature(manifest, self._token)
            check_signature(announcement, self._token)
        elif (elsewhere := next((s for s in announcement.all_sources if not is_of_this_machine(s)), None)) is not None:
            raise SnapshotError(
                f"version {manifest.version} comes from another machine ({elsewhere}), and only the run's token tells "
                f"whose weights it has: set {TOKEN_FILE} to a file with it"
            )
        check_fit(manifest, run=self._run, tokenizer_hash=self._tokenizer_hash, expected=self._expected)

    def older(self, announcement: Announcement, *, than: Version | None) -> Announcement | None:
        """The older version that an announcement names besides its own, as if it were announced alone.

        Asks its place for its manifest alone, and only where it is newer than one that was fetched before.

        Args:
          announcement: the learner's.
          than: the version fetched before.

        Raises:
          SupersededError: it is not there (any more).
          UnreachableError: its place can't be read.
          SnapshotError: refused by `check`, or what lies there is another version.
        """
        self.check(announcement)
        place = older_place(announcement)
        if place is None or (than is not None and place[0] <= than):
            return None
        version, url = place
        try:
            run_place = open_source(
                url.rpartition("/")[0], token=self._token, tls=self._tls, timeout_s=_MANIFEST_S, max_retries=0
            )
            manifest = read_bucket_manifest(run_place, version)
        except (BaseError, OSError) as e:
            line = first_line(e)
            raise UnreachableError(f"version {version} can't be read at {url}: {line}") from None
        if manifest.version != version:
            raise SnapshotError(f"version {manifest.version} lies where {version} was announced, at {url}")
        alone = Announcement(manifest=manifest, sources=(url,))
        # The place is named by the announcement that was just checked; the manifest has a signature of its own.
        alone = sign(alone, self._token) if self._token is not None else alone
        self.check(alone)
        return alone

    def fetch(
        self,
        announcement: Announcement,
        into: pathlib.Path,
        *,
        stop: threading.Event,
        base: pathlib.Path | None = None,
    ) -> DownloadStats:
        """Brings a version into a local file and proves that it arrived; `map_tensors` then gives its tensors.

        Args:
          announcement: which version, and from where.
          into: the local file.
          stop: once set, the download ends within a moment.
          base: another such file; if it holds the version that a delta leads from, the delta is fetched.

        Raises:
          SupersededError: no source has it any more; take the one that is announced now.
          SnapshotBusyError: somebody still maps what the file holds.
          StoppedError: `stop` was set.
          SnapshotError: refused by `check`, no room, or no source could be read for long enough.
        """
        manifest = announcement.manifest
        self.check(announcement)
        segment = self._segment(into)
        reserve([segment], manifest.num_bytes)
        if not segment.lock(timeout_s=self._lock_timeout_s):
            raise SnapshotBusyError(f"{into} is still mapped or written after {self._lock_timeout_s} s")
        try:
            data = segment.bytes_view(manifest.num_bytes)
            held = ReusableData.marker(into)
            # From here on the file holds no whole version, and says so; what it holds is told by its chunks.
            replace_file(part_path(into), codec.encode(manifest))
            manifest_path(into).unlink(missing_ok=True)
            zero_gaps(data, manifest.tensors)
            with contextlib.nullcontext() if base is None else base_in(base, manifest) as before:
                self._fetch_pieces(announcement, held, before, data, stop)
            replace_file(manifest_path(into), codec.encode(manifest))
            part_path(into).unlink(missing_ok=True)
            tally = DownloadStats.sum(self._tallies)
            self._count(manifest, tally)
            return tally
        except SupersededError as e:
            raise SupersededError(f"version {manifest.version} was superseded: {e}") from None
        except SnapshotError as e:
            raise type(e)(f"version {manifest.version}: {e}") from None
        finally:
            segment.unlock()

    def _fetch_pieces(
        self,
        announcement: Announcement,
        held: ReusableData,
        before: tuple[Version, np.ndarray] | None,
        data: np.ndarray,
        stop: threading.Event,
    ) -> None:
        manifest = announcement.manifest
        patience = self._patience.shared_by(min(MAX_AT_ONCE, len(manifest.shards)))
        fetches = [
            ShardFetch(
                manifest,
                piece,
                [
                    (url, functools.partial(source_at, url, token=self._token, tls=self._tls))
                    for url in own_sources(announcement, number)
                ],
                data,
                patience=patience,
            )
            for number, piece in enumerate(manifest.shards)
        ]
        self._tallies = [fetch.tally for fetch in fetches]
        fetch_all(fetches, held=held, before=before, stop=stop)

    def _count(self, manifest: WeightManifest, tally: DownloadStats) -> None:
        self.num_deltas += int(tally.num_by_delta > 0)
        self.num_failed_deltas += tally.num_failed_deltas
        logging.info(
            "weights downloaded version=%s bytes=%d of=%d chunks_by_delta=%d failed_deltas=%d bad_chunks=%d breaks=%d",
            manifest.version,
            tally.num_bytes,
            manifest.num_bytes,
            tally.num_by_delta,
            self.num_failed_deltas,
            tally.num_bad,
            tally.num_breaks,
        )

    def close(self) -> None:
        """Lets go of the local files; they stay, and so does what is mapped."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, into: pathlib.Path) -> SharedMemoryFile:
        """The file, still mapped since the last fetch unless somebody put another one in its place."""
        kept = self._segments.get(into)
        if kept is not None and not kept.is_at(into):
            kept.close()
            kept = None
        if kept is None:
            kept = self._segments[into] = SharedMemoryFile(into)
        return kept


def source_at(url: str, *, token: Token | None = None, tls: Tls | None = None) -> ObjectSource:
    """What `bridge.object_store.open_source` opens.

    Raises:
      ValueError: as `open_source`.
      SourceMissingError: a folder that is not there (any more).
    """
    try:
        return ObjectSource(open_source(url, token=token, tls=tls, timeout_s=_REQUEST_S, max_retries=0))
    except FileNotFoundError as e:
        raise SourceMissingError(str(e)) from None
