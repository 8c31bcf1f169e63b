"""Run: the components of one learner process, built from config and run folder, or resumed."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float32

from bridge.codec import FORMAT
from bridge.device_turns import TrainerTurn
from bridge.files import RunLock
from bridge.store.sql.learner_side import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.commands import Command, Save, ScoreBatch, WriteExactParams
from learner.data.problem import Problem
from learner.data.tokenizer import Tokenizer
from learner.evaluation.evaluator import Evaluator
from learner.evaluation.pinned_requests import PinnedRequests
from learner.gradient_helper.helper_client import GradientHelper, State
from learner.gradient_helper.scale_down_policy import ScaleDownPolicy
from learner.heartbeat import LearnerHeartbeat
from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.sample_log import SampleLog
from learner.model.architecture import Architecture
from learner.policy_trainer import PolicyTrainer
from learner.publish.publisher import Publisher
from learner.replicate import Replicator
from learner.restore import TimeoutAnchors
from learner.schedule.rollout_stream import RolloutStream
from learner.update.packing import PackedBatch


@dataclasses.dataclass
class Run:
    """Components of one learner process."""

    config: Config
    folder: pathlib.Path
    architecture: Architecture
    tokenizer: Tokenizer
    held_out: list[Problem]
    store: LearnerStore
    timeouts: TimeoutAnchors
    stream: RolloutStream
    trainer: PolicyTrainer
    lead: Replicator
    last_saved_step: int
    """Step of the last checkpoint begun; `checkpoints.latest` is the last one committed."""
    publisher: Publisher
    checkpoints: Checkpoints
    evaluations: Evaluator
    probe: PinnedRequests
    metrics: MetricsWriter
    samples: SampleLog
    timeline: Timeline
    heartbeat: LearnerHeartbeat
    lock: RunLock
    turn: TrainerTurn | None
    """Turn on the devices that engines share; None if the learner has its own."""
    helper: GradientHelper | None
    """Helper on engines' devices; None without helpers.num_engines."""
    scale_down: ScaleDownPolicy
    finished_step: int | None
    """Step at which the run had finished before this start reopened it, or None."""
    on_stop: Save | None = None
    """Checkpoint to save if the learner is asked to stop before the next update."""

    @property
    def step(self) -> int:
        """Number of updates made, which is the version of the weights."""
        return self.stream.step

    @property
    def has_devices(self) -> bool:
        """False while engines have the devices that they share with the learner (actor.colocated)."""
        return self.turn is None or self.turn.is_held

    def take_devices(self, on_wait: Callable[[], None]) -> None:
        """Waits until the engines have stood down, and loads the state; `on_wait` is called meanwhile."""
        if self.turn is not None and not self.turn.is_held:
            self.turn.take(on_wait)
            self.trainer.reload()

    def give_devices_back(self) -> None:
        """Moves the state to host memory and lets the engines have the devices that they share with the learner."""
        if self.turn is not None and self.turn.is_held:
            self.trainer.offload()
            self.turn.give_back()

    def look_at_helper(self, *, is_over: bool = False) -> None:
        """Lets engines give their devices to the helper if it is time, and gives it micro-batches; never waits.

        `is_over` is True once, when the rollout is over and its last micro-batches wait.
        """
        if (helper := self.helper) is None:
            return
        helper.poll()
        version, planner = self.publisher.announced_version, self.stream.planner
        if helper.state is not State.IDLE or version is None or version.step != self.step:
            return
        clock, is_long = self.stream.clock, planner.round_is_long
        if is_over:
            is_due = helper.has_waiting and self.scale_down.is_due_at_end(clock, is_long=is_long)
        else:
            is_due = self.scale_down.is_due(planner.num_arrived_in_round, clock, is_long=is_long)
        if is_due:
            self.do(WriteExactParams(str(helper.exact_file)))
            helper.take_devices(version)
            self.timeline.instant("scaled down", at=self.scale_down.released_at)

    def score(self, batch: PackedBatch) -> Float32[np.ndarray, "B S"]:
        """Returns log pi of each trained token by the current weights, in nats; takes shared devices only for that."""
        had_devices = self.has_devices
        self.take_devices(self.heartbeat.check)
        logprobs = self.do(ScoreBatch(batch))
        if not had_devices:
            self.give_devices_back()
        return logprobs

    def do(self, command: Command) -> Any:
        """Performs a command on all learner processes and returns this process's result."""
        return self.lead.do(command, self.trainer)

    def save(self) -> None:
        """Starts a checkpoint of the current state after the previous save has finished; call it between updates."""
        self._start(self.checkpoint())

    def checkpoint(self) -> Save:
        """Returns a checkpoint command with the current host state; its arrays are read when it is performed."""
        of_base = {} if self.trainer.base is None else {"lora": self.trainer.base.metadata}
        model = json.loads(self.architecture.hf_json)
        of_run = {"format": FORMAT, "model": model, "mesh": self.config.mesh.axes} | of_base
        if self.trainer.critic is not None:
            of_run |= {"critic": json.loads(self.trainer.critic.steps.architecture.hf_json)}
        host_state = of_run | self.stream.begin_save()
        return Save(self.step, host_state)

    def save_on_stop(self) -> None:
        """Saves the checkpoint in `on_stop` if it is newer than the last one, and waits for the commit."""
        if self.on_stop is not None and self.on_stop.step > self.last_saved_step:
            self.take_devices(self.heartbeat.report_progress)
            self._start(self.on_stop)
            self.stream.acknowledge(self.checkpoints.wait())

    def _start(self, save: Save) -> None:
        self.stream.acknowledge(self.checkpoints.wait())
        self.heartbeat.report_progress()
        # Anchors are read here, not in checkpoint(): per save instead of per update.
        self.do(dataclasses.replace(save, host_state=save.host_state | self.timeouts.state_dict()))
        self.last_saved_step = save.step
        self.heartbeat.report_progress()

    def close(self) -> None:
        """Releases all resources after the save in progress has finished; the next start publishes again."""
        with contextlib.ExitStack() as parts:  # closes every part, even if one raises
            for part in (
                self.store,
                self.timeline,
                self.metrics,
                self.samples,
                self.checkpoints,
                self.publisher,
            ):
                parts.callback(part.close)
            if self.turn is not None:
                parts.callback(self.turn.close)
            if self.helper is not None:
                parts.callback(self.helper.close)
            self.heartbeat.stop()
        self.lock.release()
