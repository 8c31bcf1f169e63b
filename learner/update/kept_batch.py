"""The batch of the update that is being made: its micro-batches, for the later passes over it (PPO's epochs).

They are kept as packed, each process's rows in its memory, with their logprobs under the policies that the loss
compares with, so that no policy scores a token twice: 29 bytes a place of a packed row, and 4 more for each such
policy. Nothing of it is in a checkpoint: those are made between updates, and a learner that is killed between two
passes begins the batch anew.
"""

import dataclasses
from collections.abc import Iterator

import jax

from learner.update.loss_sum import AnchorLogprobs
from learner.update.packing import MicroBatch
from learner.update.placement import own_on_host
from learner.update.step import Steps


class KeptBatch:
    """Micro-batches in the order in which they were first trained; keeps nothing where there is one pass alone."""

    def __init__(self, steps: Steps, *, epochs: int) -> None:
        """Empty.

        Args:
          steps: has the policy's own logprobs of the micro-batch last accumulated, if the loss wants them.
          epochs: passes over a batch.
        """
        self._steps, self._is_needed = steps, epochs > 1
        self._kept: list[tuple[MicroBatch, AnchorLogprobs]] = []

    def add(self, micro: MicroBatch, anchors: AnchorLogprobs) -> None:
        """Keeps the micro-batch just accumulated, and what the loss compared it with."""
        if not self._is_needed:
            return
        self._move_last_to_host()
        if self._steps.keeps_logprobs:
            anchors = dataclasses.replace(anchors, proximal=self._steps.logprobs)
        self._kept.append((micro, anchors))

    @property
    def ticket_ids(self) -> list[tuple[str, ...]]:
        """The groups that end with each."""
        return [micro.ticket_ids for micro, _ in self._kept]

    def __getitem__(self, index: int) -> tuple[MicroBatch, AnchorLogprobs]:
        """The one of that number, from 0, with the logprobs that its later passes are handed."""
        self._move_last_to_host()
        return self._kept[index]

    def __iter__(self) -> Iterator[tuple[MicroBatch, AnchorLogprobs]]:
        """All of them, each with the logprobs that its later passes are handed."""
        self._move_last_to_host()
        return iter(self._kept)

    def clear(self) -> None:
        """The update is made, or given up."""
        self._kept = []

    def _move_last_to_host(self) -> None:
        """Waits for the last one; done when the next one is there, so that the devices never idle."""
        if self._kept:
            micro, anchors = self._kept[-1]
            batch, anchors = jax.tree.map(own_on_host, (micro.batch, anchors))
            self._kept[-1] = (dataclasses.replace(micro, batch=batch), anchors)
