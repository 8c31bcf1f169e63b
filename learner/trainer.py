"""What each of the learner's processes has of the model, and all that is done with it.

Every process calls the same methods in the same order, as the leader decides (`learner.commands`): behind each there is
a program that the devices of all run together.
"""

import dataclasses
import pathlib
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float32

from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.lora import peft
from learner.lora.adapters import merge
from learner.lora.base import Base
from learner.model.config import Architecture
from learner.model.decoder import Params
from learner.model.hf import io as hf_io
from learner.update.anchors import Anchors
from learner.update.kept_batch import KeptBatch
from learner.update.packing import MicroBatch, PackedBatch
from learner.update.placement import whole_on_host
from learner.update.state import TrainState
from learner.update.step import Steps


class Publishing(Protocol):
    """Where weights go."""

    def publish(self, params: Params, *, step: int, is_awaited: bool = False) -> Any:
        """Hands them over; every process calls it at the same place, with its parts of them."""
        ...


@dataclasses.dataclass
class Trainer:
    """The state, the functions that change it, and where it goes."""

    config: Config
    architecture: Architecture
    steps: Steps
    anchors: Anchors
    kept: KeptBatch
    state: TrainState
    publisher: Publishing
    checkpoints: Checkpoints
    base: Base | None = None
    """What the state's adapters belong to; None where all parameters are trained."""

    @property
    def frozen(self) -> Params | None:
        """The base's parameters."""
        return None if self.base is None else self.base.params

    def accumulate(self, micro: MicroBatch) -> None:
        """Adds a micro-batch's gradient in the first pass over its batch.

        Returns when the one before is done, so that the devices have work while the next is prepared; where none is
        packed yet, when this one is, so that waiting for groups is not mistaken for computing.
        """
        before = self.steps.in_progress
        batch = self.steps.spread(micro.batch)
        anchors = self.anchors.score(batch)
        self.state = self.steps.accumulate(self.state, batch, anchors, self.frozen)
        self.kept.add(dataclasses.replace(micro, batch=batch) if self.steps.spreads else micro, anchors)
        jax.block_until_ready(self.steps.in_progress if micro.ends_pack else before)

    def accumulate_again(self, index: int) -> None:
        """Adds the gradient of the batch's micro-batch of that number, from 0, in a later pass."""
        micro, anchors = self.kept[index]
        before = self.steps.in_progress
        self.state = self.steps.accumulate(self.state, micro.batch, anchors, self.frozen)
        jax.block_until_ready(before)

    def apply(self, epoch: int) -> dict[str, Any]:
        """Steps the optimizer, which ends a pass over the batch; the metrics, on the host."""
        self.state, metrics = self.steps.apply(self.state, epoch)
        if epoch == self.config.rounds.epochs - 1:
            self.kept.clear()
        return jax.device_get(metrics)

    def discard(self) -> None:
        """Throws the batch away that is being filled."""
        self.state = self.steps.discard(self.state)
        self.kept.clear()

    def score(self, batch: PackedBatch) -> Float32[np.ndarray, "B S"]:
        """Log pi of each trained token by the current weights, in nats, on the host."""
        return whole_on_host(self.steps.score(self.state.params, self.steps.spread(batch), self.frozen))

    def publish(self, step: int, *, is_awaited: bool) -> None:
        """Hands the current weights over to the publisher; see there."""
        self.publisher.publish(self.weights_out(), step=step, is_awaited=is_awaited)
        self.anchors.publish(self.state.params)

    def weights_out(self) -> Params:
        """What is published: the parameters; of a run with adapters these, or the base with them added to it."""
        if self.base is None or self.config.publishes_adapters:
            return self.state.params
        scale, dtype = self.config.lora.scale, self.config.model.served_dtype
        return merge(self.base.params, self.state.params, scale=scale, dtype=dtype)

    def save(self, step: int, books: dict[str, Any]) -> None:
        """Starts a checkpoint of the state as it is between two updates; `books` are the leader's."""
        self.checkpoints.save(step, saved_part(self.state), books)

    def save_model(self, folder: pathlib.Path, tokenizer_from: pathlib.Path) -> None:
        """Writes the model as it is now; see `save_model`."""
        save_model(
            self.config,
            self.architecture,
            self.state.params,
            self.base,
            step=int(self.state.step),
            folder=folder,
            tokenizer_from=tokenizer_from,
        )


def saved_part(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of the state; it is saved between updates, where the accumulator is empty."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "skipped_updates": state.skipped_updates,
    }


def save_model(
    config: Config,
    architecture: Architecture,
    params: Params,
    base: Base | None,
    *,
    step: int,
    folder: pathlib.Path,
    tokenizer_from: pathlib.Path,
) -> None:
    """Writes a model in Hugging Face's format; one with adapters merged, and those in PEFT's format beside it.

    Args:
      config: the run's.
      architecture: the model's.
      params: its parameters, or adapters.
      base: what adapters belong to.
      step: of the parameters.
      folder: where to; the adapters' is the run folder's own, above it.
      tokenizer_from: the model that the run began with.
    """
    if base is None:
        hf_io.save(folder, architecture, params, tokenizer_from=tokenizer_from)
        return
    adapters = jax.tree.map(whole_on_host, params)
    if jax.process_index() == 0:
        target = RunFolder(folder.parent).adapter(step)
        peft.save(target, architecture, config.lora, adapters, base=str(tokenizer_from))
    dtype = config.model.param_dtype
    whole = merge(base.params, params, scale=config.lora.scale, dtype=dtype)
    hf_io.save(folder, architecture, whole, dtype=dtype, tokenizer_from=tokenizer_from)
