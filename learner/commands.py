"""What the leader decides, as the commands that every process of the learner performs, itself included.

A command is told to the others before the leader performs it, so all performs the same ones in the same order. The
list is all that processes must agree on: whatever else the leader does touches no parameters.
"""

import dataclasses
import pathlib
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32

from configs.sections import PackingConfig
from learner.trainer import Trainer
from learner.update.packing import MicroBatch, PackedBatch
from learner.update.told_batch import decode_batch, decode_micro, encode_batch, encode_micro


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """A micro-batch, in the first pass over its batch."""

    micro: MicroBatch

    def perform(self, trainer: Trainer) -> None:
        """Trains it."""
        trainer.accumulate(self.micro)


@dataclasses.dataclass(frozen=True)
class AccumulateAgain:
    """The micro-batch of that number, from 0, of the batch that every process kept."""

    index: int

    def perform(self, trainer: Trainer) -> None:
        """Trains it once more."""
        trainer.accumulate_again(self.index)


@dataclasses.dataclass(frozen=True)
class Apply:
    """The optimizer step that ends a pass over the batch."""

    epoch: int

    def perform(self, trainer: Trainer) -> dict[str, Any]:
        """Makes it; its metrics."""
        return trainer.apply(self.epoch)


@dataclasses.dataclass(frozen=True)
class Discard:
    """The batch being filled is not used."""

    def perform(self, trainer: Trainer) -> None:
        """Empties the accumulator."""
        trainer.discard()


@dataclasses.dataclass(frozen=True)
class Score:
    """A batch of samples whose logprobs are compared with the current weights' own."""

    batch: PackedBatch

    def perform(self, trainer: Trainer) -> Float32[np.ndarray, "B S"]:
        """Scores them."""
        return trainer.score(self.batch)


@dataclasses.dataclass(frozen=True)
class Publish:
    """The current weights go out, as those of a step."""

    step: int
    is_awaited: bool

    def perform(self, trainer: Trainer) -> None:
        """Hands them over."""
        trainer.publish(self.step, is_awaited=self.is_awaited)


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint of a step; the books are the leader's, who alone writes them, and are not told."""

    step: int
    books: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def perform(self, trainer: Trainer) -> None:
        """Starts it."""
        trainer.save(self.step, self.books)


@dataclasses.dataclass(frozen=True)
class SaveModel:
    """The model, in Hugging Face's format, to a folder that all see."""

    folder: str
    tokenizer_from: str

    def perform(self, trainer: Trainer) -> None:
        """Writes it."""
        trainer.save_model(pathlib.Path(self.folder), pathlib.Path(self.tokenizer_from))


@dataclasses.dataclass(frozen=True)
class Alive:
    """Nothing: the leader lives, and waits for others."""

    def perform(self, trainer: Trainer) -> None:
        """Does nothing."""
        del trainer


@dataclasses.dataclass(frozen=True)
class End:
    """All processes end, with that exit code."""

    code: int

    def perform(self, trainer: Trainer) -> None:
        """Does nothing: who is told closes what it has and ends."""
        del trainer


Command = Accumulate | AccumulateAgain | Apply | Discard | Score | Publish | Save | SaveModel | Alive | End
_KINDS: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (Accumulate, AccumulateAgain, Apply, Discard, Score, Publish, Save, SaveModel, Alive, End)
}


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    fields: msgspec.Raw


def encode(command: Command) -> bytes:
    """As it is told: of the arrays of a batch their shapes, which is all that `Steps.spread` wants of the others."""
    if isinstance(command, Accumulate):
        fields: Any = encode_micro(command.micro)
    elif isinstance(command, Score):
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
        if kind is Score:
            return Score(decode_batch(msgspec.msgpack.decode(message.fields, type=bytes), packing))
        return msgspec.msgpack.decode(message.fields, type=kind)
    except msgspec.MsgspecError as e:
        raise ValueError(f"malformed command: {e}; do the processes run the same build?") from None
