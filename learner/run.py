"""The parts of one learner process, and how they are saved together."""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

from bridge.codec import FORMAT
from bridge.run_lock import RunLock
from bridge.store.protocol import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.commands import Command, Save
from learner.data.problems import Problem
from learner.data.tokenizer import Tokenizer
from learner.heart import Heart
from learner.lead import Lead
from learner.metrics import MetricsWriter
from learner.model.config import Architecture
from learner.publish.evaluations import Evaluations
from learner.publish.pinned import Pinned
from learner.publish.publisher import Publisher
from learner.samples.log import SampleLog
from learner.schedule.stream import Stream
from learner.timeouts import TimeoutAnchors
from learner.trainer import Trainer


@dataclasses.dataclass
class Run:
    """The parts of one learner process."""

    config: Config
    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    held_out: list[Problem]
    store: LearnerStore
    timeouts: TimeoutAnchors
    stream: Stream
    trainer: Trainer
    lead: Lead
    last_saved_step: int
    """Of the last checkpoint that was begun; `checkpoints.latest` is there."""
    publisher: Publisher
    checkpoints: Checkpoints
    evaluations: Evaluations
    probe: Pinned
    metrics: MetricsWriter
    samples: SampleLog
    timeline: Timeline
    heart: Heart
    lock: RunLock
    finished_step: int | None
    """That it was finished at, if it was, before this start took it up again."""
    on_stop: Save | None = None
    """What is saved if the learner is told to stop before the next update."""

    @property
    def step(self) -> int:
        """Updates made, on the host: the version of the weights."""
        return self.stream.step

    def do(self, command: Command) -> Any:
        """Does it here and in the learner's other processes; what it returns here."""
        return self.lead.do(command, self.trainer)

    def save(self) -> None:
        """Starts a checkpoint of the run as it is between two updates; the one before is finished first."""
        self._start(self.checkpoint())

    def checkpoint(self) -> Save:
        """The run as it is between two updates; its arrays are those of the moment when it is made."""
        of_base = {} if self.trainer.base is None else {"lora": self.trainer.base.books}
        model = json.loads(self.architecture.hf_json)
        of_run = {"format": FORMAT, "model": model, "mesh": self.config.mesh.axes} | of_base
        books = of_run | self.stream.begin_save()
        return Save(self.step, books)

    def save_on_stop(self) -> None:
        """Makes the checkpoint that the run remembers, if it is newer than the last one; waits until it is there."""
        if self.on_stop is not None and self.on_stop.step > self.last_saved_step:
            self._start(self.on_stop)
            self.stream.acknowledge(self.checkpoints.wait())

    def _start(self, save: Save) -> None:
        self.stream.acknowledge(self.checkpoints.wait())
        self.heart.worked()
        # Of now, not of when `save` was made: read once a checkpoint, and not once an update.
        self.do(dataclasses.replace(save, books=save.books | self.timeouts.books()))
        self.last_saved_step = save.step
        self.heart.worked()

    def close(self) -> None:
        """Lets go of everything; a save in progress is finished first. The next start publishes anew."""
        with contextlib.ExitStack() as parts:  # each of them, also when one fails
            for part in (
                self.store,
                self.timeline,
                self.metrics,
                self.evaluations,
                self.samples,
                self.checkpoints,
                self.publisher,
            ):
                parts.callback(part.close)
            self.heart.stop()
        self.lock.release()
