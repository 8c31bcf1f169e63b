"""Run: the components of a learner process that trains by reinforcement learning."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float32

from bridge.device_turns import TrainerTurn
from learner.commands import Save, ScoreBatch, WriteExactParams
from learner.data.problem import Problem
from learner.evaluation.evaluator import Evaluator
from learner.evaluation.pinned_requests import PinnedRequests
from learner.gradient_helper.helper_client import GradientHelper, State
from learner.gradient_helper.scale_down_policy import ScaleDownPolicy
from learner.learner_process import LearnerProcess
from learner.metrics.sample_log import SampleLog
from learner.publish.publisher import Publisher
from learner.restore import TimeoutAnchors
from learner.schedule.rollout_stream import RolloutStream, encode_tickets
from learner.update.packing import PackedBatch


@dataclasses.dataclass(kw_only=True)
class Run(LearnerProcess):
    """Components of one learner process, built from config and run folder, or resumed."""

    held_out: list[Problem]
    timeouts: TimeoutAnchors
    stream: RolloutStream
    publisher: Publisher
    evaluations: Evaluator
    probe: PinnedRequests
    samples: SampleLog
    turn: TrainerTurn | None
    """Turn on the devices that engines share; None if the learner has its own."""
    helper: GradientHelper | None
    """Helper on engines' devices; None without helpers.num_engines."""
    scale_down: ScaleDownPolicy

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

    def begin_save(self) -> dict[str, Any]:
        """Returns the stream's position; `acknowledge` later deletes its groups from the store."""
        return self.stream.begin_save()

    def acknowledge(self, step: int | None) -> None:
        """Deletes the groups in the committed checkpoint of `step` from the store; None does nothing."""
        self.stream.acknowledge(step)

    def _start(self, save: Save) -> None:
        self.take_devices(self.heartbeat.report_progress)
        # Tickets are encoded and anchors read here, not in checkpoint(): per save instead of per update.
        host_state = encode_tickets(save.host_state) | self.timeouts.state_dict()
        super()._start(dataclasses.replace(save, host_state=host_state))

    def close_parts(self) -> list[Any]:
        """Returns the components that `close` closes; the next start publishes again."""
        optional = [part for part in (self.turn, self.helper) if part is not None]
        return [*super().close_parts(), self.samples, self.publisher, *optional]
