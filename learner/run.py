"""The parts of one learner process, and how they are saved together."""

import contextlib
import dataclasses
import pathlib
from typing import Any

from bridge.run_lock import RunLock
from bridge.store.protocol import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.data.problems import Problem
from learner.data.tokenizer import Tokenizer
from learner.heart import Heart
from learner.metrics import MetricsWriter
from learner.model.config import Architecture
from learner.publish.pinned import Pinned
from learner.publish.publisher import Publisher
from learner.schedule.stream import Stream
from learner.update.anchors import Anchors
from learner.update.kept_batch import KeptBatch
from learner.update.state import TrainState
from learner.update.step import Steps


@dataclasses.dataclass
class Run:
    """The parts of one learner process."""

    config: Config
    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    held_out: list[Problem]
    store: LearnerStore
    stream: Stream
    steps: Steps
    anchors: Anchors
    kept: KeptBatch
    state: TrainState
    last_saved_step: int
    last_evaluated_step: int | None
    """Of the last evaluation whose row is written or which is out; None before the first."""
    publisher: Publisher
    checkpoints: Checkpoints
    evaluation: Pinned
    probe: Pinned
    metrics: MetricsWriter
    timeline: Timeline
    heart: Heart
    lock: RunLock

    @property
    def step(self) -> int:
        """Updates made, on the host: the version of the weights."""
        return self.stream.step

    def save(self) -> None:
        """Starts a checkpoint of the run as it is between two updates; the one before is finished first."""
        self.stream.acknowledge(self.checkpoints.wait())
        self.heart.worked()
        books = {"model": self.architecture.to_hf(), "mesh": self.config.mesh.axes} | self.stream.begin_save()
        self.checkpoints.save(self.step, saved_part(self.state), books)
        self.last_saved_step = self.step
        self.heart.worked()

    def close(self) -> None:
        """Lets go of everything; a save in progress is finished first. The next start publishes anew."""
        with contextlib.ExitStack() as parts:  # each of them, also when one fails
            for part in (self.store, self.timeline, self.metrics, self.checkpoints, self.publisher):
                parts.callback(part.close)
            self.heart.stop()
        self.lock.release()


def saved_part(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of the state; it is saved between updates, where the accumulator is empty."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "skipped_updates": state.skipped_updates,
    }
