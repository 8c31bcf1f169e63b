"""Commands that all learner processes perform.

All processes perform the same commands in the same order, because each command runs a program on all devices. The
leader broadcasts a command before performing it. No other operation of the leader changes parameters.
"""

import dataclasses
import pathlib
import typing
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32

from configs.sections import PackingConfig
from learner.model.routing_replay import RoutingShape
from learner.policy_trainer import PolicyTrainer
from learner.update.packed_codec import decode_batch, decode_micro, encode_batch, encode_micro
from learner.update.packing import MicroBatch, PackedBatch


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Command: train a micro-batch in the first epoch of its batch."""

    micro: MicroBatch

    def perform(self, trainer: PolicyTrainer) -> None:
        """Accumulates the micro-batch."""
        trainer.accumulate(self.micro)


@dataclasses.dataclass(frozen=True)
class AccumulateAgain:
    """Command: train micro-batch `index` (from 0) of the epoch buffer."""

    index: int

    def perform(self, trainer: PolicyTrainer) -> None:
        """Accumulates the micro-batch from the epoch buffer."""
        trainer.accumulate_cached(self.index)


@dataclasses.dataclass(frozen=True)
class Apply:
    """Command: make the optimizer step that ends an epoch."""

    epoch: int

    def perform(self, trainer: PolicyTrainer) -> dict[str, Any]:
        """Makes the step and returns its metrics."""
        return trainer.optimizer_step(self.epoch)


@dataclasses.dataclass(frozen=True)
class Merge:
    """Command: add a helper's partial gradient, in a file on this machine, to the batch being accumulated."""

    file: str

    def perform(self, trainer: PolicyTrainer) -> None:
        """Merges the file."""
        trainer.merge(pathlib.Path(self.file))


@dataclasses.dataclass(frozen=True)
class WriteExactParams:
    """Command: write the parameters that a helper needs besides the snapshot."""

    file: str

    def perform(self, trainer: PolicyTrainer) -> None:
        """Writes the file."""
        trainer.write_exact_params(pathlib.Path(self.file))


@dataclasses.dataclass(frozen=True)
class Discard:
    """Command: discard the batch being accumulated."""

    def perform(self, trainer: PolicyTrainer) -> None:
        """Empties the accumulator and the epoch buffer."""
        trainer.discard()


@dataclasses.dataclass(frozen=True)
class ScoreBatch:
    """Command: compute a batch's logprobs by the current weights."""

    batch: PackedBatch

    def perform(self, trainer: PolicyTrainer) -> Float32[np.ndarray, "B S"]:
        """Returns log pi of the trained tokens, in nats."""
        return trainer.score(self.batch)


@dataclasses.dataclass(frozen=True)
class Publish:
    """Command: publish the current weights as version of `step`."""

    step: int
    must_publish: bool

    def perform(self, trainer: PolicyTrainer) -> None:
        """Publishes the weights."""
        trainer.publish(self.step, must_publish=self.must_publish)


@dataclasses.dataclass(frozen=True)
class Save:
    """Command: save a checkpoint; `host_state` is not broadcast, because only the leader writes it."""

    step: int
    host_state: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def perform(self, trainer: PolicyTrainer) -> None:
        """Starts the checkpoint."""
        trainer.save(self.step, self.host_state)


@dataclasses.dataclass(frozen=True)
class SaveModel:
    """Command: write the model in Hugging Face format to a shared folder."""

    folder: str
    tokenizer_from: str

    def perform(self, trainer: PolicyTrainer) -> None:
        """Writes the model."""
        trainer.save_model(pathlib.Path(self.folder), pathlib.Path(self.tokenizer_from))


@dataclasses.dataclass(frozen=True)
class Alive:
    """No-op keep-alive from the leader."""

    def perform(self, trainer: PolicyTrainer) -> None:
        """Does nothing."""
        del trainer


@dataclasses.dataclass(frozen=True)
class End:
    """Command: exit with `code`."""

    code: int

    def perform(self, trainer: PolicyTrainer) -> None:
        """Does nothing; the follower's loop returns the exit code."""
        del trainer


Command = (
    Accumulate
    | AccumulateAgain
    | Merge
    | WriteExactParams
    | Apply
    | Discard
    | ScoreBatch
    | Publish
    | Save
    | SaveModel
    | Alive
    | End
)
_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in typing.get_args(Command)}


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    fields: msgspec.Raw


def encode(command: Command) -> bytes:
    """Serializes a command; batch arrays are sent as shapes only, which is all that `TrainStep.spread` needs."""
    if isinstance(command, Accumulate):
        fields: Any = encode_micro(command.micro)
    elif isinstance(command, ScoreBatch):
        fields = encode_batch(command.batch)
    elif isinstance(command, Save):
        fields = {"step": command.step}
    else:
        fields = dataclasses.asdict(command)
    return msgspec.msgpack.encode(_Message(type(command).__name__, msgspec.Raw(msgspec.msgpack.encode(fields))))


def decode(data: bytes, packing: PackingConfig, routing: RoutingShape | None = None) -> Command:
    """Deserializes a command; raises ValueError if the message is malformed, or of another build or config."""
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        kind = _KINDS.get(message.kind)
        if kind is None:
            raise ValueError(f"command: unknown kind {message.kind[:50]!r}; run all processes with the same build")
        if kind is Accumulate:
            return Accumulate(decode_micro(msgspec.msgpack.decode(message.fields, type=bytes), packing, routing))
        if kind is ScoreBatch:
            return ScoreBatch(decode_batch(msgspec.msgpack.decode(message.fields, type=bytes), packing, routing))
        return msgspec.msgpack.decode(message.fields, type=kind)
    except msgspec.MsgspecError as e:
        raise ValueError(f"command: malformed: {e}; run all processes with the same build") from None
