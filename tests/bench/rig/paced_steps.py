"""The learner's real steps, made as slow as a real model's: the training cost is real computation.

A tiny model trains far faster than it decodes. So each micro-batch's gradient is computed several times and all but
the first are thrown away: `passes_per_token` times its real tokens, so that a token costs the same whatever the
schedule packs it with, as on an accelerator that is busy. What is left over of a whole number of passes is owed to the
next micro-batch, which makes the knob a continuous one. A micro-batch never has less than its own pass.
"""

import contextlib
import dataclasses
import time
from collections.abc import Generator

import jax
import numpy as np

from learner.model.decoder import Params
from learner.update.frozen_policies import NO_FROZEN, FrozenLogprobs
from learner.update.optimizer import Metrics, TrainState
from learner.update.packing import PackedBatch
from learner.update.train_step import TrainStep


class PacedSteps(TrainStep):
    """`TrainStep` whose `accumulate` repeats itself; results are those of `TrainStep`, bit for bit."""

    passes_per_token: float = 0.0
    num_passes: int = 0
    """Gradient passes so far."""
    num_micro_batches: int = 0
    num_real_tokens: int = 0
    cpu_s: tuple[float, ...] = ()
    """Of each update: CPU seconds of this process, all its threads, in its gradients and its optimizer step.

    Waiting costs none, and neither does another process on the same core, so it says whether two schedules train the
    same. For that each call returns when its work is done, where `TrainStep` would leave it to the device's queue.
    """
    _owed: float = 0.0
    _cpu_s: float = 0.0

    def set_pace(self, passes_per_token: float) -> None:
        """Starts counting anew."""
        self.passes_per_token = passes_per_token
        self.num_passes, self.num_micro_batches, self.num_real_tokens, self._owed = 0, 0, 0, 0.0
        self.cpu_s, self._cpu_s = (), 0.0

    def accumulate(
        self,
        state: TrainState,
        batch: PackedBatch,
        anchors: FrozenLogprobs = NO_FROZEN,
        base: Params | None = None,
    ) -> TrainState:
        tokens = int(np.count_nonzero(np.asarray(batch.segment_ids)))
        self._owed += tokens * self.passes_per_token
        passes = max(1, int(self._owed))
        self._owed -= passes
        self.num_passes += passes
        self.num_micro_batches += 1
        self.num_real_tokens += tokens
        with self._clocked():
            new_state = super().accumulate(state, batch, anchors, base)
            if passes > 1:
                # A scratch sum of its own, donated from pass to pass: each waits for the one before, and
                # `in_progress` is the last one's.
                scratch = dataclasses.replace(state, accumulator=self.zero_accumulator())
                for _ in range(passes - 1):
                    scratch = super().accumulate(scratch, batch, anchors, base)
            jax.block_until_ready(self.pending)
        return new_state

    def apply(self, state: TrainState, *epoch: int) -> tuple[TrainState, Metrics]:
        with self._clocked():
            result = jax.block_until_ready(super().apply(state, *epoch))
        self.cpu_s += (self._cpu_s,)
        self._cpu_s = 0.0
        return result

    @contextlib.contextmanager
    def _clocked(self) -> Generator[None]:
        start_s = time.process_time()
        yield
        self._cpu_s += time.process_time() - start_s
