"""Publishes weights beside learning: handed over in a moment, written, hashed and announced by a thread of its own.

Leaves are stacked in Hugging Face's layout, so a tensor is a contiguous slice of a leaf and nothing is
transposed (docs/publishing_and_proof.md).
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from bridge.names import ParamNames
from bridge.published import Announcement, WeightManifest
from bridge.snapshots.cast import cast_all_into
from bridge.snapshots.writer import SnapshotDraft, SnapshotWriter
from bridge.timeline import Timeline
from bridge.types import Version
from configs.sections import PublishConfig
from learner.model.decoder import Params
from learner.publish.export import Export
from learner.publish.outlet import Outlet

_POLL_S = 0.05
"""How often a learner that waits for a publish looks whether it is told to stop."""
_READ_S = 5.0
"""How long an optimizer step waits for parameters that are being read; a slow actor may keep their reader waiting."""
_CLOSE_S = 5.0
"""How long `close` waits for the version that is on its way."""
_LANE = 1
"""Row of the timeline; the learner's own is 0."""


@dataclasses.dataclass
class _Job:
    """A version on its way out."""

    version: Version
    export: Export
    is_awaited: bool
    start_s: float
    """Unix time."""
    is_announced: bool = False


class Publisher:
    """Puts versions out one after the other.

    A failure of its thread is raised by the next call of `publish`, `let_go`, `finish` or `check`: no version goes out
    any more. Called by one thread, the learner's.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        names: ParamNames,
        config: PublishConfig,
        *,
        incarnation: int,
        dtype: str,
        timeline: Timeline | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        outlets: Sequence[Outlet] = (),
        announce: Callable[[Announcement], None] | None = None,
    ) -> None:
        """Nothing is on its way.

        Args:
          writer: the snapshots of this machine.
          names: of the model's tensors.
          config: when weights go out, and what is done with one that is late.
          incarnation: the learner's.
          dtype: what is served: float32 or bfloat16.
          timeline: where each publish is recorded.
          while_waiting: called again and again while `publish` or `finish` waits; may raise.
          outlets: where a version goes once it is whole in shared memory, in this order; the quick ones first.
          announce: told of a version as soon as it can be fetched anywhere, and again of each place more. So a slow
            bucket keeps nobody waiting who reaches the learner.
        """
        self._writer, self._names, self._config = writer, names, config
        self._incarnation, self._dtype = incarnation, dtype
        self._timeline, self._while_waiting = timeline, while_waiting
        self._outlets, self._announce = outlets, announce
        self.version: Version | None = None
        """The last one handed over: it is announced, or will be, or a later one in its place."""
        self.announced: Version | None = None
        """The last one that actors can read."""
        self.num_publishes = 0
        """Versions handed over."""
        self.last_publish_s = 0.0
        """From the hand-over of the last announced version to its announcement."""
        self._held_up_s = 0.0
        self._num_late = self._num_replaced = self._num_outlet_failures = 0
        self._changed = threading.Condition()
        self._next: _Job | None = None
        """Handed over, not begun."""
        self._current: _Job | None = None
        self._is_read = True
        """Whether no parameters are needed any more where the learner has them."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def is_due(self, *, step: int, ends_round: bool) -> bool:
        """Whether the weights of `step` go out."""
        if self._config.when == "round_end":
            return ends_round
        return step % self._config.every_n_steps == 0

    def serves(self, step: int) -> bool:
        """Whether the weights last handed over are those of `step`."""
        return self.version is not None and self.version.step == step

    @property
    def probe_is_due(self) -> bool:
        """Whether the next publish is one to probe."""
        n = self._config.probe_every_n_publishes
        return n > 0 and self.num_publishes % n == 0

    def publish(self, params: Params, *, step: int, is_awaited: bool = False) -> Version:
        """Hands the weights over; actors may be told of the version at once, and get it when it is out.

        When the one before is not announced yet, publish.when_late says what happens: it is waited for; or, unless
        somebody waits for its samples, one that has not begun is replaced by this one, which takes its turn.

        Args:
          params: the learner's. The next optimizer step may have them; call `let_go` before it.
          step: the learner's.
          is_awaited: the learner will wait for samples of this very version, so it must go out.
        """
        self.check()
        start_s, start = time.time(), time.perf_counter()
        self._num_late += self._is_late()
        if self._config.when_late == "wait":
            self._wait_while(self._is_late)
        else:
            self._wait_while(lambda: self._next is not None and self._next.is_awaited)
            self._take_back()
        version = Version(incarnation=self._incarnation, step=step)
        export = Export(params, self._dtype, in_place=not self._is_busy())
        with self._changed:
            self._is_read = self._is_read and not export.is_in_place
            self._next = _Job(version, export, is_awaited, start_s)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._put_out_all, name="publisher", daemon=True)
            self._thread.start()
        self.version = version
        self.num_publishes += 1
        self._held_up_s = time.perf_counter() - start
        return version

    def let_go(self) -> None:
        """Before an optimizer step: waits while parameters are being read where the learner has them (`Export`).

        Not for long, however slow a reader of the snapshots is: the step is right all the same.
        """
        self.check()
        if self._is_read:
            return
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_read or self._error is not None, _READ_S)
        self._held_up_s += time.perf_counter() - start
        self.check()

    def await_announced(self) -> None:
        """Waits until actors know of all that was handed over."""
        self._wait_while(self._is_late)

    def finish(self) -> None:
        """Waits until all that was handed over has gone wherever it goes."""
        self._wait_while(self._is_busy)

    def check(self) -> None:
        """Raises what the thread failed with, if it did."""
        if self._error is not None:
            raise self._error

    def metrics(self) -> dict[str, float]:
        """What publishing took, by the names of `learner.metrics`."""
        return {
            "time/publish_s": self.last_publish_s,
            "time/publish_held_up_s": self._held_up_s,
            "publish/late": self._num_late,
            "publish/replaced": self._num_replaced,
            "publish/outlet_failures": self._num_outlet_failures,
        }

    def close(self) -> None:
        """Frees the shared memory; actors keep what they serve.

        A version on its way is finished, or given up where that takes long; one that has not begun is given up.
        """
        with self._changed:
            self._is_closing, self._next = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logging.warning("publish given up version=%s; the next start takes the folder over", self.version)
                return
        self._writer.remove()

    def _is_busy(self) -> bool:
        with self._changed:
            return self._current is not None or self._next is not None

    def _is_late(self) -> bool:
        with self._changed:
            return self._next is not None or (self._current is not None and not self._current.is_announced)

    def _wait_while(self, holds: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                is_over = self._changed.wait_for(lambda: not holds() or self._error is not None, _POLL_S)
            self.check()
            if is_over:
                return
            self._while_waiting()

    def _take_back(self) -> None:
        """Gives up the version that has not begun, if there is one; a later one replaces it."""
        with self._changed:
            if self._next is not None:
                self._num_replaced += 1
                self._next = None

    def _put_out_all(self) -> None:
        while (job := self._begin()) is not None:
            try:
                self._put_out(job)
            except BaseException as e:
                e.add_note(f"while version {job.version} was published")
                logging.error("publish failed version=%s reason=%r", job.version, e)
                with self._changed:
                    self._error, self._current, self._is_read = e, None, True
                    self._changed.notify_all()
                return
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _begin(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_closing)
            self._current, self._next = self._next, None
            return self._current

    def _put_out(self, job: _Job) -> None:
        entries = [(name, self._dtype, array.shape) for name, array in job.export.tensors(self._names).items()]
        with self._writer.begin(job.version, entries) as draft:
            self._write(draft, job.export)
            job.export.let_go()
            with self._changed:
                self._is_read = self._is_read or job.export.is_in_place  # there is one such at a time
                self._changed.notify_all()
            manifest = draft.commit()
        sources: list[str] = []
        for outlet in self._outlets:
            if new := self._put(outlet, manifest):
                sources += new
                self._tell(job, manifest, sources)
        if not sources:
            self._tell(job, manifest, sources)

    def _tell(self, job: _Job, manifest: WeightManifest, sources: Sequence[str]) -> None:
        if self._announce is not None:
            self._announce(Announcement(manifest=manifest, sources=tuple(sources)))
        if job.is_announced:
            return
        end_s = time.time()
        self.announced, self.last_publish_s = job.version, end_s - job.start_s
        if self._timeline is not None:
            self._timeline.span("publish", job.start_s, end_s, lane=_LANE, step=job.version.step)
        with self._changed:
            job.is_announced = True
            self._changed.notify_all()

    def _write(self, draft: SnapshotDraft, export: Export) -> None:
        # A function of its own: no view of the parameters is left when it returns.
        cast_all_into((draft.buffer(name), array) for name, array in export.tensors(self._names).items())

    def _put(self, outlet: Outlet, manifest: WeightManifest) -> Sequence[str]:
        try:
            return outlet.put(manifest)
        except Exception as e:
            if outlet.is_required:
                raise
            self._num_outlet_failures += 1
            logging.error("publish failed outlet=%s version=%s reason=%s", outlet.name, manifest.version, e)
            return ()
