"""Policy trainer: train state, epoch buffer and export.

The epoch buffer keeps packed micro-batches in each process's memory with the logprobs of the frozen policies, so no
policy scores a token twice. It takes 34 bytes per position of a packed row, 4 more per frozen policy, for a critic's
values and with packing.whole_groups, with routing replay 2 per layer and expert of a token, and where distillation
compares distributions 8 per token of the teacher (loss.teacher_top_k). Checkpoints exclude it:
they are made between updates, and a learner killed between two epochs restarts the batch.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float32
from safetensors.numpy import save_file

from bridge.param_names import flatten
from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.distributed.sharding import own_on_host, whole_on_host
from learner.model import hf_save, lora
from learner.model.architecture import Architecture
from learner.model.decoder import Params
from learner.model.lora import LoraBase, merge
from learner.offload import Offloaded, to_device, to_host
from learner.update.critic_step import Critic
from learner.update.frozen_policies import FrozenLogprobs, FrozenPolicies
from learner.update.optimizer import TrainState
from learner.update.packing import MicroBatch, PackedBatch
from learner.update.train_step import TrainStep, combine_params
from learner.update.tree_file import read_sharded


class KeptBatch(NamedTuple):
    """Micro-batch of the epoch buffer with what its later epochs need."""

    micro: MicroBatch
    anchors: FrozenLogprobs
    values: Any
    """Values of the critic before the update, [B, S]; None without a critic."""


class EpochCache:
    """Epoch buffer: micro-batches in training order; empty if there is only one epoch."""

    def __init__(self, steps: TrainStep, *, epochs: int) -> None:
        self._steps, self._is_needed = steps, epochs > 1
        self._kept: list[KeptBatch] = []

    def add(self, micro: MicroBatch, anchors: FrozenLogprobs, values: Array | None) -> None:
        """Keeps the micro-batch just accumulated, the frozen policies' logprobs and the critic's values of it."""
        if not self._is_needed:
            return
        self._move_last_to_host()
        if self._steps.keeps_logprobs:
            anchors = dataclasses.replace(anchors, proximal=self._steps.logprobs)
        self._kept.append(KeptBatch(micro, anchors, values))

    @property
    def ticket_ids(self) -> list[tuple[str, ...]]:
        """Group ids that end in each micro-batch."""
        return [kept.micro.ticket_ids for kept in self._kept]

    def __getitem__(self, index: int) -> KeptBatch:
        self._move_last_to_host()
        return self._kept[index]

    def __iter__(self) -> Iterator[KeptBatch]:
        self._move_last_to_host()
        return iter(self._kept)

    def clear(self) -> None:
        """Empties the buffer after an update or a discarded batch."""
        self._kept = []

    def _move_last_to_host(self) -> None:
        """Moves the last micro-batch to the host; called after the next one is queued, so that devices do not idle."""
        if self._kept:
            micro, anchors, values = self._kept[-1]
            batch, anchors, values = jax.tree.map(own_on_host, (micro.batch, anchors, values))
            self._kept[-1] = KeptBatch(dataclasses.replace(micro, batch=batch), anchors, values)


class Publishing(Protocol):
    """Publisher interface of the trainer."""

    def publish(self, params: Params, *, step: int, must_publish: bool = False) -> Any:
        """Publishes weights; a collective call in which every process passes its parts."""
        ...


class NoPublisher:
    """Publisher of a run without actors."""

    def publish(self, params: Params, *, step: int, must_publish: bool = False) -> None:
        """Publishes nothing."""
        del params, step, must_publish

    def close(self) -> None:
        """Holds no resources."""


@dataclasses.dataclass
class PolicyTrainer:
    """Train state, the operations that change it, and the publisher and checkpoints that receive it."""

    config: Config
    architecture: Architecture
    steps: TrainStep
    anchors: FrozenPolicies
    kept: EpochCache
    state: TrainState
    publisher: Publishing
    checkpoints: Checkpoints
    base: LoraBase | None = None
    """Base of the state's adapters; None if all parameters are trained."""
    critic: Critic | None = None
    """Critic whose values give the advantages; None if they are the group's."""
    _offloaded: Offloaded | None = None

    @property
    def frozen(self) -> Params | None:
        """Parameters of the frozen base; None if all parameters are trained."""
        return None if self.base is None else self.base.params

    @property
    def critic_architecture(self) -> Architecture | None:
        """Architecture of the critic's own model; None without one."""
        return None if self.critic is None or self.critic.steps.reads_policy else self.critic.steps.architecture

    @property
    def num_skipped(self) -> int:
        """Skipped steps of the policy's and the critic's optimizer."""
        states = [self.state] if self.critic is None else [self.state, self.critic.state]
        return sum(int(state.skipped_updates) for state in states)

    def _policy_params(self) -> Params:
        return combine_params(self.frozen, self.state.params)

    def offload(self) -> None:
        """Moves the state, base, frozen policies and critic to host memory until `reload`; for one process."""
        if self._offloaded is None:
            critic = None if self.critic is None else self.critic.state
            self._offloaded = to_host((self.state, self.frozen, self.anchors.params, critic))
            self._place(self._offloaded.tree)

    def reload(self) -> None:
        """Moves everything back to the devices. Without `offload` before, it has no effect."""
        if self._offloaded is not None:
            self._place(to_device(self._offloaded))
            self._offloaded = None

    def _place(self, tree: tuple[TrainState, Params | None, Any, TrainState | None]) -> None:
        self.state, base, self.anchors.params, critic = tree
        if self.critic is not None and critic is not None:
            self.critic.state = critic
        if self.base is not None and base is not None:
            self.base = dataclasses.replace(self.base, params=base)

    def accumulate(self, micro: MicroBatch) -> None:
        """Adds a micro-batch's gradient in the first epoch of its batch, and before it the critic's.

        Waits only for the previous micro-batch, so that devices compute while the host packs. Waits for this one if it
        ends the pack, so that waiting for groups does not count as computing.
        """
        before = self.steps.pending
        batch, values = self.steps.spread(micro.batch), None
        if self.critic is not None:
            batch, values = self.critic.accumulate(self._policy_params(), batch)
        anchors = self.anchors.score(batch, micro.teachers)
        self.state = self.steps.accumulate(self.state, batch, anchors, self.frozen)
        is_new = self.steps.spreads or self.critic is not None
        self.kept.add(dataclasses.replace(micro, batch=batch) if is_new else micro, anchors, values)
        jax.block_until_ready(self.steps.pending if micro.ends_pack else before)

    def accumulate_cached(self, index: int) -> None:
        """Adds the gradient of the batch's micro-batch `index` (from 0) in a later epoch."""
        micro, anchors, values = self.kept[index]
        before = self.steps.pending
        batch = self.steps.put(micro.batch)
        if self.critic is not None:
            self.critic.accumulate(self._policy_params(), batch, values)
        self.state = self.steps.accumulate(self.state, batch, anchors, self.frozen)
        jax.block_until_ready(before)

    def optimizer_step(self, epoch: int) -> dict[str, Any]:
        """Makes the optimizer step that ends an epoch; returns the metrics on the host."""
        self.state, metrics = self.steps.apply(self.state, epoch)
        if self.critic is not None:
            metrics |= self.critic.apply(epoch)
        if epoch == self.config.rounds.epochs - 1:
            self.kept.clear()
        return jax.device_get(metrics)

    def merge(self, file: pathlib.Path) -> None:
        """Adds a helper's partial gradient to the accumulator; every process reads its own shards of the file."""
        self.state = self.steps.merge(self.state, read_sharded(file, self.state.accumulator))

    def write_exact_params(self, file: pathlib.Path) -> None:
        """Writes the parameters that a snapshot in the served dtype does not hold exactly, in safetensors format.

        They are the norms' scales, or the adapters; the first process writes the file.
        """
        leaves = flatten(self.state.params)
        exact = {path: leaf for path, leaf in leaves.items() if self.base is not None or path.endswith("/scale")}
        arrays = {p: whole_on_host(x) if isinstance(x, jax.Array) else np.asarray(x) for p, x in exact.items()}
        if jax.process_index() == 0:
            save_file(arrays, file)

    def discard(self) -> None:
        """Discards the batch being accumulated."""
        self.state = self.steps.discard(self.state)
        if self.critic is not None:
            self.critic.discard()
        self.kept.clear()

    def score(self, batch: PackedBatch) -> Float32[np.ndarray, "B S"]:
        """Returns log pi of each trained token by the current weights, in nats, on the host."""
        return whole_on_host(self.steps.score(self.state.params, self.steps.spread(batch), self.frozen))

    def publish(self, step: int, *, must_publish: bool) -> None:
        """Publishes the current weights and updates the frozen policies that follow publishes."""
        self.publisher.publish(self.published_params(), step=step, must_publish=must_publish)
        self.anchors.publish(self.state.params)

    def published_params(self) -> Params:
        """Returns the weights to publish: the parameters, the adapters, or the base merged with the adapters."""
        if self.base is None or self.config.publishes_adapters:
            return self.state.params
        scale, dtype = self.config.lora.scale, self.config.model.served_dtype
        return merge(self.base.params, self.state.params, scale=scale, dtype=dtype)

    def save(self, step: int, host_state: dict[str, Any]) -> None:
        """Starts a checkpoint of the state between two updates; only the leader's `host_state` is written."""
        critic = None if self.critic is None else self.critic.state
        self.checkpoints.save(step, saved_part(self.state, critic), host_state)

    def save_model(self, folder: pathlib.Path, tokenizer_from: pathlib.Path) -> None:
        """Writes the current model; see the function `save_model`."""
        save_model(
            self.config,
            self.architecture,
            self.state.params,
            self.base,
            step=int(self.state.step),
            folder=folder,
            tokenizer_from=tokenizer_from,
        )


def saved_part(state: TrainState, critic: TrainState | None = None) -> dict[str, Any]:
    """Returns the checkpointed part of the state, and of the critic's; accumulators are empty between updates."""
    saved: dict[str, Any] = {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "skipped_updates": state.skipped_updates,
    }
    return saved if critic is None else saved | {"critic": saved_part(critic)}


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
    """Writes a model in Hugging Face format to `folder`.

    If `base` is given, `params` are its adapters: `folder` gets the merged model, and the adapters are written in PEFT
    format to the run folder that contains `folder`. `tokenizer_from` is the folder of the run's initial model.
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
