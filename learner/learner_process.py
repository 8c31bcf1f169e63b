"""Learner process: the components and operations of any leading process that trains, and the checkpoints it makes."""

import abc
import contextlib
import dataclasses
import json
import pathlib
import time
from typing import Any

from bridge.codec import FORMAT
from bridge.files import RunLock
from bridge.store.sql.learner_side import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.commands import Command, Save
from learner.data.tokenizer import Tokenizer
from learner.heartbeat import LearnerHeartbeat
from learner.metrics.metrics_writer import MetricsWriter
from learner.model.architecture import Architecture
from learner.policy_trainer import PolicyTrainer
from learner.replicate import Replicator


@dataclasses.dataclass(kw_only=True)
class LearnerProcess(abc.ABC):
    """Components of one leading learner process, whatever it trains on."""

    config: Config
    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    store: LearnerStore
    trainer: PolicyTrainer
    lead: Replicator
    last_saved_step: int
    """Step of the last checkpoint begun; `checkpoints.latest` is the last one committed."""
    checkpoints: Checkpoints
    metrics: MetricsWriter
    timeline: Timeline
    heartbeat: LearnerHeartbeat
    lock: RunLock
    finished_step: int | None
    """Step at which the run had finished before this start reopened it, or None."""
    on_stop: Save | None = None
    """Checkpoint to save if the learner is asked to stop before the next update."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Number of updates made, which is the version of the weights."""

    @abc.abstractmethod
    def begin_save(self) -> dict[str, Any]:
        """Returns the position in the training data for this step's checkpoint; later updates do not change it."""

    def acknowledge(self, step: int | None) -> None:
        """Records that the checkpoint of `step` is committed; None does nothing."""
        del step

    def do(self, command: Command) -> Any:
        """Performs a command on all learner processes and returns this process's result."""
        return self.lead.do(command, self.trainer)

    def save(self) -> None:
        """Starts a checkpoint of the current state after the previous save has finished; call it between updates."""
        self._start(self.checkpoint())

    def checkpoint(self) -> Save:
        """Returns a checkpoint command with the current host state; its arrays are read when it is performed.

        A stop within the next update saves it after that update has begun.
        """
        of_base = {} if self.trainer.base is None else {"lora": self.trainer.base.metadata}
        model = json.loads(self.architecture.hf_json)
        of_run = {"format": FORMAT, "model": model, "mesh": self.config.mesh.axes} | of_base
        of_run["optimizer"] = self.config.optimizer.name
        if self.trainer.critic is not None:
            of_run["critic"] = self.trainer.critic.steps.metadata
        return Save(self.step, of_run | self.begin_save())

    def save_on_stop(self) -> None:
        """Saves the checkpoint in `on_stop` if it is newer than the last one, and waits for the commit."""
        if self.on_stop is not None and self.on_stop.step > self.last_saved_step:
            self._start(self.on_stop)
            self.acknowledge(self.checkpoints.wait())

    def _start(self, save: Save) -> None:
        self.acknowledge(self.checkpoints.wait())
        self.heartbeat.report_progress()
        self.do(save)
        self.last_saved_step = save.step
        self.heartbeat.report_progress()

    def save_last(self) -> None:
        """Waits for the save in progress, and saves the current step if it is not; may raise CheckpointError."""
        self.acknowledge(self.checkpoints.wait())
        self.heartbeat.report_progress()
        if (self.checkpoints.latest or 0) != self.step:
            self.save()
            self.acknowledge(self.checkpoints.wait())
            self.heartbeat.report_progress()
            self.checkpoints.check_saved(self.step)

    def close_parts(self) -> list[Any]:
        """Returns the components that `close` closes, the last one first."""
        return [self.store, self.timeline, self.metrics, self.checkpoints]

    def close(self) -> None:
        """Releases all resources after the save in progress has finished."""
        with contextlib.ExitStack() as parts:  # closes every part, even if one raises
            for part in self.close_parts():
                parts.callback(part.close)
            self.heartbeat.stop()
        self.lock.release()


def compute(run: LearnerProcess, command: Command, name: str, **about: Any) -> tuple[Any, float, float]:
    """Performs a command on all processes and logs it as `name`; returns (result, start, end), in monotonic seconds."""
    num_before = run.trainer.steps.num_compilations
    start = time.monotonic()
    result = run.do(command)
    end = time.monotonic()
    compiled = {"compiled": True} if run.trainer.steps.num_compilations != num_before else {}
    run.timeline.took(name, start, end, **about, **compiled)
    return result, start, end
