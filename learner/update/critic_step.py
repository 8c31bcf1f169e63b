"""Critic: jitted accumulate and apply of a value model, on the micro-batches of the policy.

`accumulate` computes values, advantages and the gradient of the value loss in one pass, when a micro-batch arrives.
Parameters are constant during an epoch, so in the first one these values are those before the update. Later epochs keep
its advantages and targets. The update's loss is sum_n l_n / number of actions: sums and denominator are accumulated
separately and divided once, so it depends neither on the packing nor on the order, as the policy's. With
critic.backbone=policy only the head is trained, on the policy's hidden states.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from configs.schema import Config
from learner.distributed.sharding import (
    batch_sharding,
    compiler_options,
    param_shardings,
    placed,
    put,
    replicated,
    shardings,
)
from learner.model.architecture import Architecture
from learner.model.decoder import NO_LORA, Params
from learner.model.value_head import (
    abstract_critic,
    critic_architecture,
    decoder_params,
    values_of,
    with_head,
    zero_head,
)
from learner.objective.gae import actions_of, gae, value_loss
from learner.update import diagnostics
from learner.update.diagnostics import ValueStats
from learner.update.loss_fn import attention_paths, make_forward
from learner.update.optimizer import Accumulator, ApplyUpdate, Metrics, TrainState, init_state, make_optimizer
from learner.update.packing import PackedBatch
from learner.update.reductions import Moments
from learner.update.train_step import TrainStep, combine_params


class CriticStep:
    """Device functions of the critic; each is compiled once per batch shape, as the policy's."""

    def __init__(self, architecture: Architecture, config: Config, mesh: Mesh, policy: TrainStep) -> None:
        """Prepares the functions without compiling them.

        The critic has the batches, mesh and recomputation of `policy`, whose compilations also count the critic's.
        """
        self.architecture = architecture
        self._config, self._compilations = config.critic, policy.compilations
        self.reads_policy = config.critic.backbone == "policy"
        lora = config.lora if self.reads_policy else NO_LORA
        self._forward = make_forward(architecture, config, mesh, lora, remat=policy.remat)
        optimizer = dataclasses.replace(config.optimizer, learning_rate=config.critic.learning_rate)
        num_steps = config.run.num_updates * config.rounds.epochs
        transform = make_optimizer(optimizer, num_steps=num_steps, mesh=mesh)
        self._apply_update = ApplyUpdate(
            optimizer=transform,
            config=optimizer,
            epochs=config.rounds.epochs,
            num_steps=num_steps,
            seed=config.run.seed,
            finalize=diagnostics.finalize_values,
        )
        dtype = config.model.param_dtype
        params = abstract_critic(architecture, config)
        state = jax.eval_shape(lambda p: init_state(p, transform, ValueStats), params)
        self._state: TrainState = placed(state, param_shardings(state, mesh))
        self._batch = policy.abstract_batch()

        rows, whole, options = batch_sharding(mesh), replicated(mesh), compiler_options(mesh)
        of_state, of_batch, of_policy = shardings(self._state), shardings(self._batch), None
        if self.reads_policy:
            of_policy = shardings(combine_params(policy.abstract_base(), policy.abstract_state().params))
        self._rows = rows
        self._zero_head = jax.jit(lambda: zero_head(architecture, dtype), out_shardings=whole)
        self._init_rest = jax.jit(
            lambda p: dataclasses.replace(init_state(p, transform, ValueStats), params=None),
            out_shardings=dataclasses.replace(of_state, params=None),
        )
        self._zeros = jax.jit(
            lambda: Accumulator.zeros(self._state.params, ValueStats), out_shardings=of_state.accumulator
        )
        self._jit_accumulate = jax.jit(
            self._accumulate,
            in_shardings=(of_state.accumulator, of_state.params, of_policy, of_batch, rows, whole),
            out_shardings=(of_state.accumulator, rows, rows),
            donate_argnums=0,
            compiler_options=options,
        )
        self._jit_apply = jax.jit(
            self._apply,
            in_shardings=(of_state, whole),
            out_shardings=(of_state, whole),
            donate_argnums=0,
            compiler_options=options,
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """Model of the critic as a checkpoint names it: its config.json, or that it is the policy's."""
        return {"backbone": "policy"} if self.reads_policy else json.loads(self.architecture.hf_json)

    def init(self, decoder: Params) -> TrainState:
        """Returns a new state of a decoder's parameters and a value head of zeros; without a copy, as `TrainStep`.

        The decoder is empty if the head reads the policy.
        """
        params = with_head(decoder, self._zero_head())
        spread = jax.device_put(params, shardings(self._state.params))
        return dataclasses.replace(self._init_rest(spread), params=spread)

    def abstract_state(self) -> TrainState:
        """Returns the state as `jax.ShapeDtypeStruct` with shardings, into which a checkpoint is restored."""
        return self._state

    def zero_accumulator(self) -> Accumulator:
        """Returns an empty accumulator."""
        return self._zeros()

    def accumulate(
        self,
        state: TrainState,
        policy: Params,
        batch: PackedBatch,
        values: Float32[Array | np.ndarray, "B S"] | None = None,
    ) -> tuple[TrainState, Float32[Array, "B S"], Float32[Array, "B S"]]:
        """Adds a micro-batch to the optimizer step in progress; donates the accumulator.

        `policy` are the policy's current parameters, adapters combined with their base. In the first epoch the batch's
        `advantages` are rewards and `values` is None. In later ones the batch has its advantages, and `values` are
        those of the first epoch. Returns the state, the advantages, and the values before the update.
        """
        is_first = values is None
        kept = batch.behavior_logprobs if values is None else values  # not read in the first epoch
        with self._compilations.reported("critic", batch):
            accumulator, advantages, old_values = self._jit_accumulate(
                state.accumulator,
                state.params,
                policy if self.reads_policy else None,
                batch,
                put(kept, self._rows),
                np.bool_(is_first),
            )
        return dataclasses.replace(state, accumulator=accumulator), advantages, old_values

    def apply(self, state: TrainState, epoch: int = 0) -> tuple[TrainState, Metrics]:
        """Steps the optimizer and empties the accumulator; donates the state. As `TrainStep.apply`."""
        with self._compilations.reported("critic apply"):
            return self._jit_apply(state, np.int32(epoch))

    def _accumulate(
        self,
        accumulator: Accumulator,
        params: Params,
        policy: Params | None,
        batch: PackedBatch,
        kept_values: Array,
        is_first: Array,
    ) -> tuple[Accumulator, Array, Array]:
        self._compilations.count("critic")
        config, segment_ids = self._config, jnp.asarray(batch.segment_ids)
        mask, given = jnp.asarray(batch.loss_mask), jnp.asarray(batch.advantages)
        actions = actions_of(mask, segment_ids, by_turn=config.level == "turn")

        def loss_sum(params: Params) -> tuple[Array, Any]:
            values = self._values(params, policy, batch)
            old = jnp.where(is_first, jax.lax.stop_gradient(values), kept_values)
            factors = {"discount": float(config.discount), "gae_lambda": float(config.gae_lambda)}
            new = gae(old, given, actions, segment_ids, **factors)
            advantages = jnp.where(mask, jnp.where(is_first, new, given), 0.0)
            returns = advantages + old
            loss, clipped = value_loss(values, old, returns, value_clip=config.value_clip)
            stats = ValueStats(
                returns=Moments.where(returns, actions.starts),
                values=Moments.where(old, actions.starts),
                errors=Moments.where(advantages, actions.starts),
                num_clipped=jnp.sum(clipped & actions.starts, dtype=jnp.int32),
            )
            return jnp.sum(jnp.where(actions.starts, loss, 0.0)), (stats, advantages, old)

        (loss, (stats, advantages, values)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        # Split like the parameters, so that XLA uses reduce-scatter instead of all-reduce.
        grads = jax.lax.with_sharding_constraint(grads, shardings(self._state.params))
        own = Accumulator(grads=grads, denominator=stats.returns.count, rejected=jnp.float32(0), loss=loss, stats=stats)
        return accumulator + own, advantages, values

    def _values(self, params: Params, policy: Params | None, batch: PackedBatch) -> Float[Array, "B S"]:
        """Returns at each token the value of the state before it, which the model's output at i - 1 predicts."""
        decoder, routed = (params, None) if policy is None else (policy, batch.routed_experts)
        args = (batch.tokens, batch.positions, batch.segment_ids, batch.prefix_ids, routed)
        return jnp.roll(values_of(params, self._forward(decoder_params(decoder), *args)), 1, axis=1)

    def _apply(self, state: TrainState, epoch: Array) -> tuple[TrainState, Metrics]:
        self._compilations.count("critic apply")
        return self._apply_update(state, epoch)


@dataclasses.dataclass
class Critic:
    """Critic of a run: its step functions and its state."""

    steps: CriticStep
    state: TrainState

    def accumulate(
        self, policy: Params, batch: PackedBatch, values: Float32[Array | np.ndarray, "B S"] | None = None
    ) -> tuple[PackedBatch, Float32[Array, "B S"]]:
        """Adds a micro-batch; returns it with advantages in place of rewards, and the values before the update."""
        self.state, advantages, old_values = self.steps.accumulate(self.state, policy, batch, values)
        return dataclasses.replace(batch, advantages=advantages), old_values

    def apply(self, epoch: int) -> Metrics:
        """Makes the optimizer step that ends an epoch; returns metrics by their names in `metric_names.py`."""
        self.state, metrics = self.steps.apply(self.state, epoch)
        return {f"critic/{name}": value for name, value in metrics.items()}

    def discard(self) -> None:
        """Discards the accumulated sums."""
        self.state = dataclasses.replace(self.state, accumulator=self.steps.zero_accumulator())


def build_critic_step(policy: Architecture, config: Config, mesh: Mesh, steps: TrainStep) -> CriticStep | None:
    """Returns the critic's device functions beside the policy's `steps`; None if the run has no critic.

    Raises FileNotFoundError if critic.path lacks a config.json, and ValueError if the critic's model is unsupported,
    has too few words, or does not divide by the mesh.
    """
    architecture = critic_architecture(config, policy)
    if architecture is None:
        return None
    attention_paths(architecture, config, mesh, whose="the critic's")
    return CriticStep(architecture, config, mesh, steps)
