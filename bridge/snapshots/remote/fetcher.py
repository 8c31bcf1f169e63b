"""Fetcher of snapshots from other machines: announced by the store, read from a server or bucket, verified per chunk.

Before the first byte, it checks signatures, run, tokenizer, names, shapes, dtypes, sizes, and that the hosts' shards
make up the whole file. It then fetches all shards concurrently (`ShardFetch`).
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
"""Timeout of each of the two requests for a manifest, in seconds."""
_REQUEST_S = 600.0
"""Timeout of one range, in seconds. `RetryPolicy.silence_s` separately bounds the time between blocks."""


class SnapshotFetcher:
    """Fetcher of announced versions into warm local files. One thread at a time, except for `older` and `check`."""

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
        """Opens nothing yet.

        Args:
          expected: the model's tensors; snapshots with other names, dtypes or shapes are rejected.
          token: authenticates to servers, and must have signed announcements and manifests. None: only sources on this
            machine are allowed.
          tls: CA that is trusted in addition to the system's.
          lock_timeout_s: seconds to wait for a file that another process maps.
        """
        self._run, self._tokenizer_hash, self._expected = run, tokenizer_hash, expected
        self._token, self._tls = token, tls
        self._patience = patience or RetryPolicy()
        self._lock_timeout_s = lock_timeout_s
        self._segments: dict[pathlib.Path, SharedMemoryFile] = {}
        self.num_deltas = 0
        """Cumulative number of versions that used a delta, at least in part."""
        self.num_failed_deltas = 0
        """Cumulative number of deltas that did not reconstruct all chunks, so that the rest was fetched in full."""
        self._tallies: list[DownloadStats] = []

    @property
    def num_arrived_bytes(self) -> int:
        """Bytes received by the current or last fetch. Any thread may poll it."""
        return sum(tally.num_bytes for tally in self._tallies)

    @property
    def has_requested(self) -> bool:
        """True if the current or last fetch has sent a request. Before, it allocates memory and hashes."""
        return any(tally.num_requests for tally in self._tallies)

    def check(self, announcement: Announcement) -> None:
        """Checks an announcement before any allocation or request.

        Raises SnapshotError if the announcement is unsigned or has a wrong signature, names another machine without a
        token, has another run, tokenizer or model, or is malformed.
        """
        manifest = announcement.manifest
        if self._token is not None:
            check_signature(manifest, self._token)
            check_signature(announcement, self._token)
        elif (elsewhere := next((s for s in announcement.all_sources if not is_of_this_machine(s)), None)) is not None:
            raise SnapshotError(
                f"version {manifest.version} comes from another machine ({elsewhere}), so its signature must be "
                f"verified: set {TOKEN_FILE} to a file with the run's token"
            )
        check_fit(manifest, run=self._run, tokenizer_hash=self._tokenizer_hash, expected=self._expected)

    def older(self, announcement: Announcement, *, than: Version | None) -> Announcement | None:
        """Returns the older version that an announcement names as a fallback, as its own announcement.

        Returns None if that version is not newer than `than`, the version fetched before. Requests only the manifest.
        Raises SupersededError if the source does not have the version any more, UnreachableError if it cannot be read,
        and SnapshotError if `check` fails or the source has another version.
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
            raise UnreachableError(f"version {version} cannot be read at {url}: {line}") from None
        if manifest.version != version:
            raise SnapshotError(f"{url}: expected the announced version {version}, got {manifest.version}")
        alone = Announcement(manifest=manifest, sources=(url,))
        # The checked announcement names the URL, and the manifest has its own signature.
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
        """Downloads a version into a local file and verifies it; `map_tensors` returns its tensors.

        If `base`, another local file, holds the base of a delta, the delta is fetched.

        Raises:
          SupersededError: no source has the version any more; fetch the currently announced one.
          SnapshotBusyError: a process still maps the file.
          DownloadStoppedError: `stop` was set.
          SnapshotError: `check` fails, too little memory is free, or no source could be read in time.
        """
        manifest = announcement.manifest
        self._tallies = []
        self.check(announcement)
        segment = self._segment(into)
        reserve([segment], manifest.num_bytes)
        if not segment.lock(timeout_s=self._lock_timeout_s):
            raise SnapshotBusyError(f"{into} is still mapped or written after {self._lock_timeout_s} s")
        try:
            data = segment.bytes_view(manifest.num_bytes)
            held = ReusableData.marker(into)
            # The file is incomplete from here on, and the marker says so. Hashes decide which chunks are valid.
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
        except OSError as e:  # the folder's memory is full
            raise SnapshotError(f"version {manifest.version} cannot be written to {into.parent}: {e}") from e
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
        """Closes the local files; the files and existing maps stay."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, into: pathlib.Path) -> SharedMemoryFile:
        """Returns the file, which stays mapped between fetches unless it was replaced."""
        kept = self._segments.get(into)
        if kept is not None and not kept.is_at(into):
            kept.close()
            kept = None
        if kept is None:
            kept = self._segments[into] = SharedMemoryFile(into)
        return kept


def source_at(url: str, *, token: Token | None = None, tls: Tls | None = None) -> ObjectSource:
    """Opens the source at a URL. Raises as `open_source`, but SourceMissingError if a folder does not exist."""
    try:
        return ObjectSource(open_source(url, token=token, tls=tls, timeout_s=_REQUEST_S, max_retries=0))
    except FileNotFoundError as e:
        raise SourceMissingError(str(e)) from None
