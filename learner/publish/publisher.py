"""Weight publishing concurrently with training: a thread writes, hashes and announces each version.

Leaves are stacked in Hugging Face's layout, so a tensor is a contiguous slice of a leaf and no tensor is transposed
(docs/design/weight_publishing.md). On several hosts each host writes its own rows (`weight_export.py`). A version is
announced when all hosts have written theirs (`commit.py`).
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from bridge.files import first_line
from bridge.param_names import TensorNames
from bridge.rollout_types import Version
from bridge.snapshots.shared_memory import cast_all_into
from bridge.snapshots.snapshot_draft import SnapshotDraft
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.timeline import Timeline
from bridge.weight_types import Announcement, WeightManifest
from configs.sections import PublishConfig
from learner.distributed.channel import Processes, SingleProcess
from learner.model.decoder import Params
from learner.publish.announcer import SourceAnnouncer
from learner.publish.commit import WAIT_S, CommitOutcome, Next, VersionCommit
from learner.publish.destinations import Destination, UploadQueue
from learner.publish.weight_export import Export, ExportPlan

_POLL_S = 0.05
"""Interval at which a learner that waits for a publish calls `on_wait`, in seconds."""
BUCKET_WAIT_S = 600.0
"""Timeout for the upload of the last version at the end of a run, in seconds."""
_CLOSE_S = 5.0
"""Timeout of `close` for the version in progress, in seconds."""
RETRY_INTERVAL_S = 1.0
"""Pause before a version is retried after a host failed to write its piece, in seconds."""
_MAX_FAILED = 5
"""Consecutive failed versions after which the learner exits."""
_LANE = 1
"""Timeline row; the learner's own row is 0."""


@dataclasses.dataclass
class _Job:
    """Version that waits or is in progress."""

    version: Version
    export: Export
    must_publish: bool
    start_s: float
    is_announced: bool = False


class Publisher:
    """Publisher of versions, one at a time. On several hosts each host has one, and all make the same calls.

    The next call of `publish`, `finish` or `check` raises a failure of the publisher's thread, which then publishes no
    further version. Only the learner's thread calls the methods.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        names: TensorNames,
        config: PublishConfig,
        *,
        incarnation: int,
        dtype: str,
        timeline: Timeline | None = None,
        on_wait: Callable[[], None] = lambda: None,
        destinations: Sequence[Destination] = (),
        announce: Callable[[Announcement], None] | None = None,
        hosts: Processes | None = None,
        hosts_wait_s: float = WAIT_S,
    ) -> None:
        """Creates an idle publisher; its thread starts with the first `publish`.

        Args:
          on_wait: called periodically while `publish` or `finish` waits; may raise.
          destinations: destinations of a version that is complete in shared memory, in this order. Slow ones have a
            queue each (`UploadQueue`).
          announce: called on the leader when a version can be fetched from a first source, and again for each further
            source, by one thread at a time. A slow bucket therefore does not delay actors that reach the learner.
          hosts_wait_s: how long each host waits for the others, in seconds: longer than a write and than `announce`
            take.
        """
        self._agreement = VersionCommit(hosts or SingleProcess(), writer, timeout_s=hosts_wait_s)
        self._share: ExportPlan | None = None
        """Export plan of this host, equal for all versions."""
        self._writer, self._names, self._config = writer, names, config
        self._incarnation, self._dtype = incarnation, dtype
        self._timeline, self._while_waiting = timeline, on_wait
        self._destinations = [o for o in destinations if not o.is_slow]
        self._announcer = SourceAnnouncer(announce)
        self._upload_queues = [UploadQueue(o, self._uploaded, self._upload_failed) for o in destinations if o.is_slow]
        self.version: Version | None = None
        """Last version passed to `publish`. It, or a later version, is or will be announced."""
        self.announced_version: Version | None = None
        """Last version that is complete in shared memory and in all destinations that are not slow."""
        self.num_publishes = 0
        """Versions passed to `publish`."""
        self.last_publish_s = 0.0
        """Seconds from the call of `publish` until `announced_version` was published."""
        self._held_up_s = 0.0
        self._num_late = self._num_replaced = self._num_failures = 0
        self._num_failed_in_a_row = 0
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Job] = collections.deque()
        """Versions that wait, at most one on the leader. On another host the version that the leader has started may
        still be in this queue."""
        self._current: _Job | None = None
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def is_due(self, *, step: int, ends_round: bool) -> bool:
        """Returns True if the weights of `step` are to be published."""
        if self._config.when == "round_end":
            return ends_round
        return step % self._config.every_n_steps == 0

    def is_published(self, step: int) -> bool:
        """Returns True if the last version passed to `publish` has this step."""
        return self.version is not None and self.version.step == step

    @property
    def probe_is_due(self) -> bool:
        """True if the next publish is one to probe."""
        n = self._config.probe_every_n_publishes
        return n > 0 and self.num_publishes % n == 0

    def publish(self, params: Params, *, step: int, must_publish: bool = False) -> Version:
        """Starts to publish the weights and returns their version, which tickets may name before it is available.

        If the previous version is not announced yet, `publish.when_late` decides. `wait` blocks. `replace` drops the
        previous version if it has not started and no samples of it are awaited; the new version takes its place in the
        queue. With `must_publish` this version is never replaced, because the learner will wait for samples of it. The
        next optimizer step may reuse `params`.
        """
        self.check()
        start_s = time.monotonic()
        self._num_late += self._is_late()
        if self._config.when_late == "wait":
            self._wait_while(self._is_late)
        else:
            try:
                self._wait_while(lambda: bool(self._waiting) and self._waiting[-1].must_publish)
            except BaseException:
                self._agreement.same(False)  # the other hosts wait for a message
                raise
            self._withdraw_waiting()
        version = Version(incarnation=self._incarnation, step=step)
        export = Export(params, self._dtype, self._names, share=self._share)
        self._share = export.share
        with self._changed:
            self._waiting.append(_Job(version, export, must_publish, start_s))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._put_out_all, name="publisher", daemon=True)
            self._thread.start()
        self.version = version
        self.num_publishes += 1
        self._held_up_s = time.monotonic() - start_s
        return version

    def wait_until_published(self) -> None:
        """Waits until all versions are in shared memory and in all destinations that are not slow; not for a bucket."""
        self._wait_while(self._is_late)

    def finish(self) -> None:
        """Waits until all versions are stored in all destinations; for a bucket at most `BUCKET_WAIT_S`."""
        self._wait_while(self._is_busy)
        end_s = time.monotonic() + BUCKET_WAIT_S
        self._wait_while(lambda: any(lane.is_busy for lane in self._upload_queues) and time.monotonic() < end_s)
        for lane in self._upload_queues:
            if lane.unsent_version is not None:
                logging.error(
                    "publish incomplete version=%s destination=%s waited_s=%.0f",
                    lane.unsent_version,
                    lane.destination.name,
                    time.monotonic() - end_s + BUCKET_WAIT_S,
                )

    def check(self) -> None:
        """Raises the failure of the publisher's thread, if it failed."""
        if self._error is not None:
            raise self._error

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of publishing, by their names in `learner.metrics.metric_names`."""
        return {
            "time/publish_s": self.last_publish_s,
            "time/publish_blocked_s": self._held_up_s,
            "publish/late": self._num_late,
            "publish/replaced": self._num_replaced,
            "publish/destination_failures": self._num_failures + sum(lane.num_failures for lane in self._upload_queues),
            "publish/destination_replaced": sum(lane.num_replaced for lane in self._upload_queues),
        }

    def close(self) -> None:
        """Frees the shared memory; actors keep the weights that they serve.

        Finishes a version in progress, or abandons it after `_CLOSE_S` seconds. Abandons a version that has not
        started.
        """
        deadline_s = time.monotonic() + _CLOSE_S
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        for lane in self._upload_queues:
            lane.close(max(0.0, deadline_s - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            logging.warning("publish abandoned version=%s; the next start reuses the folder", self.version)
            return
        self._writer.remove()

    def _is_busy(self) -> bool:
        with self._changed:
            return self._current is not None or bool(self._waiting)

    def _is_late(self) -> bool:
        with self._changed:
            return bool(self._waiting) or (self._current is not None and not self._current.is_announced)

    def _wait_while(self, holds: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                is_over = self._changed.wait_for(lambda: not holds() or self._error is not None, _POLL_S)
            self.check()
            if is_over:
                return
            self._while_waiting()

    def _withdraw_waiting(self) -> None:
        """Drops the version that has not started at the leader, if one waits; a later version replaces it."""
        with self._changed:
            replaced = self._waiting.pop() if self._agreement.is_leader and self._waiting else None
        if self._agreement.same(replaced is not None):
            self._num_replaced += 1
            if replaced is None:
                with self._changed:
                    self._waiting.pop()

    def _put_out_all(self) -> None:
        try:
            while (job := self._begin()) is not None:
                self._publish_version(job)
                with self._changed:
                    self._current = None
                    self._changed.notify_all()
        except BaseException as e:
            with self._changed:
                if self._current is not None:
                    e.add_note(f"while version {self._current.version} was published")
                logging.error("publish failed version=%s reason=%r", self._current and self._current.version, e)
                self._error, self._current = self._error or e, None
                self._changed.notify_all()
        finally:
            with contextlib.suppress(TimeoutError):
                self._agreement.end()

    def _begin(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            if self._agreement.is_leader:
                self._current = self._waiting.popleft()
        version = self._agreement.begin(self._current.version if self._current is not None else None)
        if version is None:
            return None
        with self._changed:
            while self._current is None or self._current.version.step != version.step:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return None
                self._current = self._waiting.popleft()
            self._current.version = version
            return self._current

    def _publish_version(self, job: _Job) -> None:
        while (decision := self._decide(job)).next != "announce":
            self._num_failures += 1
            logging.error("publish failed version=%s next=%s reason=%s", job.version, decision.next, decision.failure)
            if decision.next == "end":
                raise SnapshotError(
                    f"publish: {_MAX_FAILED} consecutive versions could not be written: {decision.failure}"
                )
            if decision.next == "skip":
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, RETRY_INTERVAL_S)
        job.export.let_go()
        assert decision.manifest is not None
        self._writer.announce(decision.manifest)
        self._announce_destinations(decision.manifest)
        self._is_out(job)
        for lane in self._upload_queues:
            lane.put(decision.manifest)

    def _decide(self, job: _Job) -> CommitOutcome:
        """Writes this host's piece and returns the common decision of all hosts."""
        part, failure = None, ""
        try:
            with self._writer.begin(job.version, job.export.entries, job.export.share.blocks) as draft:
                self._write(draft, job.export)
                if self._agreement.count == 1:  # with several hosts a retry may need the copies
                    job.export.let_go()
                part = draft.seal()
        except (SnapshotError, OSError) as e:
            if self._agreement.count == 1:
                raise
            failure = first_line(e)
        decision = self._agreement.decide(part, failure, otherwise=self._otherwise(job))
        self._num_failed_in_a_row = 0 if decision.next == "announce" else self._num_failed_in_a_row + 1
        return decision

    def _otherwise(self, job: _Job) -> Next:
        """Returns the leader's decision for a missing piece: `end`, `skip` or `again`."""
        if self._num_failed_in_a_row + 1 >= _MAX_FAILED:
            return "end"
        with self._changed:
            return "skip" if self._waiting and not job.must_publish else "again"

    def _announce_destinations(self, manifest: WeightManifest) -> None:
        """Stores the version in the destinations that are not slow, and announces its sources."""
        sources: list[str] = []
        for destination in self._destinations:
            if new := self._put(destination, manifest):
                sources += new
                if self._agreement.count == 1:
                    self._announcer.announce(manifest, sources)
        if self._agreement.count > 1:
            of_hosts = self._agreement.there(sources)
            if all(of_hosts) or not self._upload_queues:  # with a host missing, actors wait for the bucket's copy
                self._announcer.announce(manifest, (), host_sources=tuple(of_hosts) if any(of_hosts) else ())
        elif not sources and not self._upload_queues:
            self._announcer.announce(manifest, sources)

    def _uploaded(self, manifest: WeightManifest, sources: Sequence[str]) -> None:
        try:
            self._announcer.announce(manifest, sources, is_slow=True)
        except BaseException as e:
            self._upload_failed(e)

    def _upload_failed(self, error: BaseException) -> None:
        with self._changed:
            if not self._is_closing:
                self._error = self._error or error
            self._changed.notify_all()

    def _is_out(self, job: _Job) -> None:
        end_s = time.monotonic()
        self.announced_version, self.last_publish_s = job.version, end_s - job.start_s
        if self._timeline is not None:
            self._timeline.took("publish", job.start_s, end_s, lane=_LANE, step=job.version.step)
        with self._changed:
            job.is_announced = True
            self._changed.notify_all()

    def _write(self, draft: SnapshotDraft, export: Export) -> None:
        # A separate function, so that no view of the copies outlives it.
        cast_all_into(export.pairs(draft))

    def _put(self, destination: Destination, manifest: WeightManifest) -> Sequence[str]:
        try:
            return destination.put(manifest)
        except Exception as e:
            if destination.is_required:
                raise
            self._num_failures += 1
            logging.error("publish failed destination=%s version=%s reason=%s", destination.name, manifest.version, e)
            return ()
