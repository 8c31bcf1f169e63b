"""Weights, optimizer state, update epochs, scores, export; commands that all processes run.

They are kept as packed, each process's rows in its memory, with their logprobs under the policies that the loss
compares with, so that no policy scores a token twice: 29 bytes a place of a packed row, and 4 more for each such
policy. Nothing of it is in a checkpoint: those are made between updates, and a learner that is killed between two
passes begins the batch anew.

Every process calls the same methods in the same order, as the leader decides (`learner.policy_trainer`): behind each
there is a program that the devices of all run together.

A command is told to the others before the leader performs it, so all performs the same ones in the same order. The
list is all that processes must agree on: whatever else the leader does touches no parameters.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jaxtyping import Float32

from configs.run_folder import RunFolder
from configs.schema import Config
from configs.sections import PackingConfig
from learner.checkpoint import Checkpoints
from learner.distributed.sharding import own_on_host, whole_on_host
from learner.model import hf_save, lora
from learner.model.architecture import Architecture
from learner.model.decoder import Params
from learner.model.lora import LoraBase, merge
from learner.update.frozen_policies import FrozenLogprobs, FrozenPolicies
from learner.update.optimizer import TrainState
from learner.update.packed_codec import decode_batch, decode_micro, encode_batch, encode_micro
from learner.update.packing import MicroBatch, PackedBatch
from learner.update.train_step import TrainStep


class EpochCache:
    """Micro-batches in the order in which they were first trained; keeps nothing where there is one pass alone."""

    def __init__(self, steps: TrainStep, *, epochs: int) -> None:
        """Empty.

        Args:
          steps: has the policy's own logprobs of the micro-batch last accumulated, if the loss wants them.
          epochs: passes over a batch.
        """
        self._steps, self._is_needed = steps, epochs > 1
        self._kept: list[tuple[MicroBatch, FrozenLogprobs]] = []

    def add(self, micro: MicroBatch, anchors: FrozenLogprobs) -> None:
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

    def __getitem__(self, index: int) -> tuple[MicroBatch, FrozenLogprobs]:
        """The one of that number, from 0, with the logprobs that its later passes are handed."""
        self._move_last_to_host()
        return self._kept[index]

    def __iter__(self) -> Iterator[tuple[MicroBatch, FrozenLogprobs]]:
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


class Publishing(Protocol):
    """Where weights go."""

    def publish(self, params: Params, *, step: int, must_publish: bool = False) -> Any:
        """Hands them over; every process calls it at the same place, with its parts of them."""
        ...


@dataclasses.dataclass
class PolicyTrainer:
    """The state, the functions that change it, and where it goes."""

    config: Config
    architecture: Architecture
    steps: TrainStep
    anchors: FrozenPolicies
    kept: EpochCache
    state: TrainState
    publisher: Publishing
    checkpoints: Checkpoints
    base: LoraBase | None = None
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
        before = self.steps.pending
        batch = self.steps.spread(micro.batch)
        anchors = self.anchors.score(batch)
        self.state = self.steps.accumulate(self.state, batch, anchors, self.frozen)
        self.kept.add(dataclasses.replace(micro, batch=batch) if self.steps.spreads else micro, anchors)
        jax.block_until_ready(self.steps.pending if micro.ends_pack else before)

    def accumulate_cached(self, index: int) -> None:
        """Adds the gradient of the batch's micro-batch of that number, from 0, in a later pass."""
        micro, anchors = self.kept[index]
        before = self.steps.pending
        self.state = self.steps.accumulate(self.state, micro.batch, anchors, self.frozen)
        jax.block_until_ready(before)

    def optimizer_step(self, epoch: int) -> dict[str, Any]:
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

    def publish(self, step: int, *, must_publish: bool) -> None:
        """Hands the current weights over to the publisher; see there."""
        self.publisher.publish(self.published_params(), step=step, must_publish=must_publish)
        self.anchors.publish(self.state.params)

    def published_params(self) -> Params:
        """What is published: the parameters; of a run with adapters these, or the base with them added to it."""
        if self.base is None or self.config.publishes_adapters:
            return self.state.params
        scale, dtype = self.config.lora.scale, self.config.model.served_dtype
        return merge(self.base.params, self.state.params, scale=scale, dtype=dtype)

    def save(self, step: int, host_state: dict[str, Any]) -> None:
        """Starts a checkpoint of the state as it is between two updates; `books` are the leader's."""
        self.checkpoints.save(step, saved_part(self.state), host_state)

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
    base: LoraBase | None,
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
        hf_save.save(folder, architecture, params, tokenizer_from=tokenizer_from)
        return
    adapters = jax.tree.map(whole_on_host, params)
    if jax.process_index() == 0:
        target = RunFolder(folder.parent).adapter(step)
        lora.save(target, architecture, config.lora, adapters, base=str(tokenizer_from))
    dtype = config.model.param_dtype
    whole = merge(base.params, params, scale=config.lora.scale, dtype=dtype)
    hf_save.save(folder, architecture, whole, dtype=dtype, tokenizer_from=tokenizer_from)


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """A micro-batch, in the first pass over its batch."""

    micro: MicroBatch

    def perform(self, trainer: PolicyTrainer) -> None:
        """Trains it."""
        trainer.accumulate(self.micro)


@dataclasses.dataclass(frozen=True)
class AccumulateAgain:
    """The micro-batch of that number, from 0, of the batch that every process kept."""

    index: int

    def perform(self, trainer: PolicyTrainer) -> None:
        """Trains it once more."""
        trainer.accumulate_cached(self.index)


@dataclasses.dataclass(frozen=True)
class Apply:
    """The optimizer step that ends a pass over the batch."""

    epoch: int

    def perform(self, trainer: PolicyTrainer) -> dict[str, Any]:
        """Makes it; its metrics."""
        return trainer.optimizer_step(self.epoch)


@dataclasses.dataclass(frozen=True)
class Discard:
    """The batch being filled is not used."""

    def perform(self, trainer: PolicyTrainer) -> None:
        """Empties the accumulator."""
        trainer.discard()


@dataclasses.dataclass(frozen=True)
class ScoreBatch:
    """A batch of samples whose logprobs are compared with the current weights' own."""

    batch: PackedBatch

    def perform(self, trainer: PolicyTrainer) -> Float32[np.ndarray, "B S"]:
        """Scores them."""
        return trainer.score(self.batch)


@dataclasses.dataclass(frozen=True)
class Publish:
    """The current weights go out, as those of a step."""

    step: int
    must_publish: bool

    def perform(self, trainer: PolicyTrainer) -> None:
        """Hands them over."""
        trainer.publish(self.step, must_publish=self.must_publish)


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint of a step; the books are the leader's, who alone writes them, and are not told."""

    step: int
    host_state: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def perform(self, trainer: PolicyTrainer) -> None:
        """Starts it."""
        trainer.save(self.step, self.host_state)


@dataclasses.dataclass(frozen=True)
class SaveModel:
    """The model, in Hugging Face's format, to a folder that all see."""

    folder: str
    tokenizer_from: str

    def perform(self, trainer: PolicyTrainer) -> None:
        """Writes it."""
        trainer.save_model(pathlib.Path(self.folder), pathlib.Path(self.tokenizer_from))


@dataclasses.dataclass(frozen=True)
class Alive:
    """Nothing: the leader lives, and waits for others."""

    def perform(self, trainer: PolicyTrainer) -> None:
        """Does nothing."""
        del trainer


@dataclasses.dataclass(frozen=True)
class End:
    """All processes end, with that exit code."""

    code: int

    def perform(self, trainer: PolicyTrainer) -> None:
        """Does nothing: who is told closes what it has and ends."""
        del trainer


Command = Accumulate | AccumulateAgain | Apply | Discard | ScoreBatch | Publish | Save | SaveModel | Alive | End
_KINDS: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (Accumulate, AccumulateAgain, Apply, Discard, ScoreBatch, Publish, Save, SaveModel, Alive, End)
}


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    fields: msgspec.Raw


def encode(command: Command) -> bytes:
    """As it is told: of the arrays of a batch their shapes, all that `TrainStep.spread` wants of the others."""
    if isinstance(command, Accumulate):
        fields: Any = encode_micro(command.micro)
    elif isinstance(command, ScoreBatch):
        fields = encode_batch(command.batch)
    elif isinstance(command, Save):
        fields = {"step": command.step}
    else:
        fields = dataclasses.asdict(command)
    return msgspec.msgpack.encode(_Message(type(command).__name__, msgspec.Raw(msgspec.msgpack.encode(fields))))


def decode(data: bytes, packing: PackingConfig) -> Command:
    """What was told.

    Raises:
      ValueError: it is no command, or one of another build or configuration.
    """
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        kind = _KINDS.get(message.kind)
        if kind is None:
            raise ValueError(f"no command: {message.kind[:50]!r}; do the processes run the same build?")
        if kind is Accumulate:
            return Accumulate(decode_micro(msgspec.msgpack.decode(message.fields, type=bytes), packing))
        if kind is ScoreBatch:
            return ScoreBatch(decode_batch(msgspec.msgpack.decode(message.fields, type=bytes), packing))
        return msgspec.msgpack.decode(message.fields, type=kind)
    except msgspec.MsgspecError as e:
        raise ValueError(f"malformed command: {e}; do the processes run the same build?") from None
