"""Weight client: an actor's side of in-flight updates (PipelineRL, section 4): prefetch and verify, then swap.

A rejected snapshot is retried with growing pauses, while the previous version is still served: the copy may be at
fault, and in round mode the learner publishes nothing newer until this actor has served.
"""

import pathlib
import time
from collections.abc import Callable

from absl import logging

from actor.engine_protocol import Engine, WeightLoadError
from actor.weights.source import WeightSource
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, UnreachableError
from bridge.timeline import Timeline
from bridge.weight_types import WeightManifest

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
_TELL_S = 60.0
"""Minimum seconds between two log lines of a persistent failure."""
_HOPELESS_AFTER = 12
_STUCK_AFTER = 3
"""Rejections of one version after which it counts as permanently broken."""


class WeightClient:
    """Client that keeps an engine on the announced version."""

    def __init__(
        self,
        source: WeightSource,
        engine: Engine,
        *,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes ownership of `source`, which `close` closes."""
        self._source, self._engine = source, engine
        self._timeline, self._clock = timeline, clock
        self._held: WeightManifest | None = None
        """Last fetched version, complete and verified."""
        self._file: pathlib.Path | None = None
        self._refused: Version | None = None
        self._num_refusals = 0
        self._retry_at = 0.0
        self._last_refusal: Exception | None = None
        self._is_unreachable = False
        """True if the last fetch could reach none of the version's sources within its timeout."""
        self._starts_over = False
        """True if the announced version is fetched even if it is already served."""
        self.is_swapping = False
        """True while the engine loads a version; generation may pause."""
        self.num_refused = 0
        """Cumulative rejected snapshots; each attempt counts."""
        self.timings: dict[str, float] = {}
        """Timings of the last update, in seconds: prefetch_s (copy and hash), verify_s (check against the model),
        pause_s (generation paused), load_s (part of pause_s that loaded and verified)."""

    @property
    def is_blocked(self) -> bool:
        """True if the announced version was rejected repeatedly or is unreachable, so that its tickets must wait."""
        return self._num_refusals >= _STUCK_AFTER or self._is_unreachable

    def raise_if_refused_too_long(self) -> None:
        """Raises WeightLoadError if the announced version was rejected for minutes."""
        if self._num_refusals >= _HOPELESS_AFTER:
            raise WeightLoadError(
                f"version {self._refused} was rejected {self._num_refusals} times: {self._last_refusal}"
            )

    async def prefetch(self) -> WeightManifest | None:
        """Copies and verifies the announced version if it is newer than the served one; returns None if not.

        A higher incarnation is newer, whatever its step. Repeated calls before the swap copy once.
        """
        is_waiting = self._num_refusals > 0 and self._clock() < self._retry_at
        if is_waiting and self._refused is None:
            return None
        try:
            manifest = await self._source.announced()
        except SnapshotError as e:
            self._refuse(None, e)
            return None
        if self._refused is None:
            self._num_refusals = 0  # the announcement is readable again
        served = self._engine.version
        if manifest is None:
            return None
        if served is not None and (manifest.version < served or (manifest.version == served and not self._starts_over)):
            return None
        if is_waiting and manifest.version == self._refused:
            return None
        if manifest == self._held:
            return manifest
        start_s = time.monotonic()
        self._held = None
        try:
            self._file = await self._source.fetch(manifest)
        except SupersededError:
            return None  # the next call takes the newer one
        except UnreachableError as e:  # not the version's fault: the next call resumes the download
            self._is_unreachable = True
            # Retried every few seconds while the learner is unreachable.
            text = "snapshot unreachable version=%s served=%s reason=%s"
            logging.log_every_n_seconds(logging.WARNING, text, _TELL_S, manifest.version, served, e)
            return None
        except SnapshotError as e:
            self._refuse(manifest.version, e)
            return None
        self._held, self._is_unreachable = manifest, False
        end_s = time.monotonic()
        self.timings["prefetch_s"] = end_s - start_s
        num_bytes = manifest.num_bytes
        self._timeline.took("prefetch", start_s, end_s, version=str(manifest.version), bytes=num_bytes)
        return manifest

    async def swap(self, manifest: WeightManifest) -> bool:
        """Puts a prefetched version into service; returns False if the engine rejected it and serves the old one.

        Raises ValueError if `prefetch` returned another manifest, and EngineDeadError if the update failed midway.
        """
        if self._file is None or manifest != self._held:
            raise ValueError(f"swap: expected the manifest that prefetch returned ({self._held}), got {manifest}")
        self.is_swapping = True
        try:
            timings = await self._engine.swap_weights(self._file, manifest)
        except WeightLoadError as e:
            self._refuse(manifest.version, e)
            return False
        finally:
            self.is_swapping = False
            self._source.release()
        end_s = time.monotonic()
        self._refused, self._num_refusals, self._starts_over = None, 0, False
        self.timings |= {
            "verify_s": timings.check_s,
            "pause_s": timings.pause_s,
            "load_s": timings.load_s,
        }
        self._timeline.took(
            "pause", end_s - timings.pause_s, end_s, version=str(manifest.version), load_s=timings.load_s
        )
        logging.info(
            "weights served version=%s prefetch_s=%.3f verify_s=%.3f pause_s=%.3f load_s=%.3f age_s=%.3f",
            manifest.version,
            self.timings["prefetch_s"],
            timings.check_s,
            timings.pause_s,
            timings.load_s,
            time.time() - manifest.created_s,
        )
        return True

    def start_over(self) -> None:
        """Discards trust in the served weights and the local copy: the next update refetches the announced version."""
        self._held, self._starts_over = None, True
        self._source.forget()

    def close(self) -> None:
        """Releases the local file."""
        self._source.close()

    def _refuse(self, version: Version | None, reason: Exception) -> None:
        if version != self._refused:
            self._refused, self._num_refusals = version, 0
        self._held = None  # the copy may be at fault
        wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._num_refusals, 30))
        self._num_refusals += 1
        self._last_refusal = reason
        self.num_refused += 1
        self._retry_at = self._clock() + wait_s
        served = self._engine.version
        self._timeline.instant("refused", version=str(version), served=str(served), reason=str(reason))
        logging.error(
            "snapshot rejected version=%s served=%s retry_in_s=%.1f reason=%s", version, served, wait_s, reason
        )
