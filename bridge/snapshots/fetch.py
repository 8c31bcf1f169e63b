"""Snapshots from other machines: announced by the store, read from a server or a bucket, verified chunk by chunk.

Everything is checked before the first byte: signatures, run, tokenizer, names, shapes, dtypes and sizes. Chunks that
are there already are not fetched again: those of a download that broke off, and those that the version before has too.
Where the version before lies beside it, the delta is fetched in place of the rest.
"""

import pathlib
import threading
import urllib.parse
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from bridge import codec
from bridge.buckets import is_loopback, is_of_this_machine, open_place
from bridge.files import replace_file
from bridge.published import Announcement, FileEntry, WeightManifest
from bridge.secrets import TOKEN_FILE, Tls, Token
from bridge.snapshots.chunks import each_on_all_cores, has_chunk
from bridge.snapshots.delta_download import base_of, download_delta
from bridge.snapshots.download import Patience, Pieces, StoppedError, Tally, download
from bridge.snapshots.layout import (
    SnapshotBusyError,
    SnapshotError,
    SupersededError,
    TensorTable,
    check_fit,
    manifest_path,
    part_path,
    read_manifest,
    reserve,
)
from bridge.snapshots.object_place import ObjectPlace
from bridge.snapshots.places import NotThereError, Place
from bridge.snapshots.plain_place import PlainPlace
from bridge.snapshots.segment import Segment
from bridge.snapshots.signing import check_signature

_REQUEST_S = 600.0
"""How long one range may take in all; that blocks keep coming is watched apart (`Patience.silence_s`)."""


class SnapshotFetcher:
    """Fetches announced versions into warm local files. One thread at a time."""

    def __init__(
        self,
        *,
        run: str,
        tokenizer_hash: str,
        expected: TensorTable | None = None,
        token: Token | None = None,
        tls: Tls | None = None,
        patience: Patience | None = None,
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
        self._patience = patience or Patience()
        self._lock_timeout_s = lock_timeout_s
        self._segments: dict[pathlib.Path, Segment] = {}
        self.num_deltas = 0
        """Versions that came by their delta, wholly or in part."""
        self.num_failed_deltas = 0
        """Deltas that did not lead to all of a version, so that the rest was fetched in full."""
        self._tally = Tally()

    @property
    def num_arrived_bytes(self) -> int:
        """Of the fetch that is under way, or of the last one; any thread may look whether it grows."""
        return self._tally.num_bytes

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
        elif (elsewhere := next((s for s in announcement.sources if not is_of_this_machine(s)), None)) is not None:
            raise SnapshotError(
                f"version {manifest.version} comes from another machine ({elsewhere}), and only the run's token tells "
                f"whose weights it has: set {TOKEN_FILE} to a file with it"
            )
        check_fit(manifest, run=self._run, tokenizer_hash=self._tokenizer_hash, expected=self._expected)

    def fetch(
        self,
        announcement: Announcement,
        into: pathlib.Path,
        *,
        stop: threading.Event,
        base: pathlib.Path | None = None,
    ) -> Tally:
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
        reserve([segment], manifest.file.num_bytes)
        if not segment.lock(timeout_s=self._lock_timeout_s):
            raise SnapshotBusyError(f"{into} is still mapped or written after {self._lock_timeout_s} s")
        try:
            data = segment.bytes_view(manifest.file.num_bytes)
            there = _chunks_there(data, manifest.file, into)
            # From here on the file holds no whole version, and says so; what it holds is told by its chunks.
            replace_file(part_path(into), codec.encode(manifest))
            manifest_path(into).unlink(missing_ok=True)
            tally = self._tally = Tally()
            missing = [i for i in range(manifest.file.num_chunks) if i not in there]
            places = [(url, self._opener(url)) for url in announcement.sources]
            if base is not None:
                missing = self._by_delta(manifest, base, places, data, missing, stop, tally)
            pieces = Pieces.of(manifest.file, data)
            download(pieces, places, data, chunks=missing, stop=stop, patience=self._patience, tally=tally)
            replace_file(manifest_path(into), codec.encode(manifest))
            part_path(into).unlink(missing_ok=True)
            self._count(manifest, tally)
            return tally
        except SupersededError as e:
            raise SupersededError(f"version {manifest.version} was superseded: {e}") from None
        except SnapshotError as e:
            raise type(e)(f"version {manifest.version}: {e}") from None
        finally:
            segment.unlock()

    def _count(self, manifest: WeightManifest, tally: Tally) -> None:
        self.num_deltas += int(tally.num_by_delta > 0)
        self.num_failed_deltas += tally.num_failed_deltas
        logging.info(
            "weights downloaded version=%s bytes=%d of=%d chunks_by_delta=%d failed_deltas=%d bad_chunks=%d breaks=%d",
            manifest.version,
            tally.num_bytes,
            manifest.file.num_bytes,
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

    def _by_delta(
        self,
        manifest: WeightManifest,
        base: pathlib.Path,
        places: Sequence[tuple[str, Callable[[], Place]]],
        data: np.ndarray,
        missing: list[int],
        stop: threading.Event,
        tally: Tally,
    ) -> list[int]:
        """Makes what it can from the version before; returns the chunks that are still missing."""
        with base_of(manifest, base) as before:
            if before is None or not missing:
                return missing
            try:
                left = download_delta(
                    manifest, before, places, data, chunks=missing, stop=stop, patience=self._patience, tally=tally
                )
            except StoppedError:
                raise
            except SnapshotError as e:
                logging.warning("delta failed version=%s reason=%s; the full file is fetched", manifest.version, e)
                left = [i for i in missing if not has_chunk(data, manifest.file, i)]
        tally.num_by_delta = len(missing) - len(left)
        tally.num_failed_deltas = int(bool(left))
        return left

    def _segment(self, into: pathlib.Path) -> Segment:
        """The file, still mapped since the last fetch unless somebody put another one in its place."""
        kept = self._segments.get(into)
        if kept is not None and not kept.is_at(into):
            kept.close()
            kept = None
        if kept is None:
            kept = self._segments[into] = Segment(into)
        return kept

    def _opener(self, url: str) -> Callable[[], Place]:
        return lambda: place_at(url, token=self._token, tls=self._tls)


def place_at(url: str, *, token: Token | None = None, tls: Tls | None = None) -> Place:
    """What `bridge.buckets.open_place` opens; http, which this machine alone serves, by the quicker way.

    Raises:
      ValueError: as `open_place`.
      NotThereError: a folder that is not there (any more).
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http" and is_loopback(parts.hostname or ""):
        return PlainPlace(url, token=token)
    try:
        return ObjectPlace(open_place(url, token=token, tls=tls, timeout_s=_REQUEST_S, max_retries=0))
    except FileNotFoundError as e:
        raise NotThereError(str(e)) from None


def _chunks_there(data: np.ndarray, file: FileEntry, into: pathlib.Path) -> set[int]:
    """The chunks that need not be fetched; each hashed anew, whatever is written of it."""
    candidates: list[int] = []
    if part_path(into).exists():
        candidates = list(range(file.num_chunks))
    elif (held := held_in(into)) is not None and held.file.chunk_bytes == file.chunk_bytes:
        num_common = min(held.file.num_chunks, file.num_chunks)
        candidates = [i for i in range(num_common) if held.file.chunk_hash(i) == file.chunk_hash(i)]
    is_there = each_on_all_cores(lambda i: has_chunk(data, file, i), candidates)
    return {i for i, there in zip(candidates, is_there, strict=True) if there}


def held_in(into: pathlib.Path) -> WeightManifest | None:
    """Which version a file holds, whole and verified; None also where that can't be read."""
    try:
        return read_manifest(manifest_path(into))
    except SnapshotError:  # damaged, or of another build: it is fetched anew
        return None
