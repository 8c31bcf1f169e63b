"""The jitted steps: accumulate a micro-batch, apply an update, score tokens.

An update's gradient is sum_t w_t dl_t / sum(denominators). `accumulate` adds to the sums, `apply` divides
once, so the gradient depends neither on how the tokens were split into micro-batches nor on their order.

Every function is compiled once, for the one batch shape, with explicit shardings; nothing in here waits
for a device. `num_compilations` counts what was traced, and is a metric: 2 in a healthy run.

Donation: `accumulate` donates the accumulator only and leaves the parameters' buffers alone, so an export may
read them meanwhile. `apply` donates the whole state: nobody may hold its parameters over that call.
"""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32

from configs.schema import Config
from learner import diagnostics, losses
from learner.mesh import batch_sharding, param_shardings
from learner.model.config import ModelConfig
from learner.model.decoder import abstract_params, make_apply, output_head
from learner.model.logprobs import token_logprobs
from learner.optimizer import learning_rate, make_optimizer
from learner.packing import PackedBatch, empty_batch
from learner.state import Accumulator, Params, TrainState, init_state

Metrics = dict[str, Array]


class Steps:
    """The learner's device functions for one model, configuration and mesh."""

    def __init__(self, model_config: ModelConfig, config: Config, mesh: Mesh) -> None:
        """Compiles nothing yet."""
        self._config = config
        self._optimizer = make_optimizer(config.optimizer, num_updates=config.run.num_updates)
        self._forward = make_apply(
            model_config,
            compute_dtype=config.model.compute_dtype,
            remat=config.model.remat,
            activation_sharding=batch_sharding(mesh),
        )
        self._num_traces: collections.Counter[str] = collections.Counter()
        params = abstract_params(model_config, config.model.param_dtype)
        self._abstract = jax.eval_shape(lambda p: init_state(p, self._optimizer), params)
        replicated = NamedSharding(mesh, PartitionSpec())
        state = self._shardings = param_shardings(self._abstract, mesh)
        rows = batch_sharding(mesh)
        batch = jax.tree.map(lambda x: rows if x.ndim else replicated, empty_batch(config.packing))
        self._batch_shardings = batch
        self._init_rest = jax.jit(
            lambda p: dataclasses.replace(init_state(p, self._optimizer), params=None),
            out_shardings=dataclasses.replace(state, params=None),
        )
        self._zeros = jax.jit(lambda: Accumulator.zeros(params), out_shardings=state.accumulator)
        self._jit_accumulate = jax.jit(
            self._accumulate,
            in_shardings=(state.accumulator, state.params, replicated, batch),
            out_shardings=state.accumulator,
            donate_argnums=0,
        )
        self._jit_apply = jax.jit(
            self._apply, in_shardings=(state,), out_shardings=(state, replicated), donate_argnums=0
        )
        self._jit_score = jax.jit(
            lambda params, batch: self._logprobs(params, batch)[0],
            in_shardings=(state.params, batch),
            out_shardings=replicated,
        )

    @property
    def num_compilations(self) -> int:
        """How often `accumulate` and `apply` were traced; 2 in a healthy run."""
        return self._num_traces.total()

    def init(self, params: Params) -> TrainState:
        """A fresh state from parameters, spread over the mesh if they are not yet.

        Arrays that are in place already are taken over, not copied: the first `apply` donates them.
        """
        placed = jax.device_put(params, self._shardings.params)
        return dataclasses.replace(self._init_rest(placed), params=placed)

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._abstract, self._shardings
        )

    def zero_accumulator(self) -> Accumulator:
        """An empty accumulator, for a state restored from a checkpoint that left it out."""
        return self._zeros()

    def put(self, batch: PackedBatch) -> PackedBatch:
        """Spreads a batch over the mesh; every process passes the same one."""

        def one(x: np.ndarray | Array, sharding: NamedSharding) -> Array:
            if isinstance(x, jax.Array):
                return x
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, batch, self._batch_shardings)

    def accumulate(self, state: TrainState, batch: PackedBatch) -> TrainState:
        """Adds a micro-batch to the update that is being filled; donates the accumulator."""
        accumulator = self._jit_accumulate(state.accumulator, state.params, state.step, self.put(batch))
        return dataclasses.replace(state, accumulator=accumulator)

    def apply(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Steps the optimizer and empties the accumulator; donates the state.

        A loss or gradient that is not finite, and an update without trained tokens, leave parameters and
        optimizer state bit-identical and count in `skipped_updates`; the step advances in any case.
        Metrics stay on the device.
        """
        return self._jit_apply(state)

    def score(self, params: Params, batch: PackedBatch) -> Float32[Array, "B S"]:
        """Scores packed tokens: log pi of each given those before it, at the token's own position.

        0 at a row's first position; only where loss_mask is True is it meant to be read.
        """
        return self._jit_score(params, self.put(batch))

    def _accumulate(self, accumulator: Accumulator, params: Params, step: Array, batch: PackedBatch) -> Accumulator:
        self._num_traces["accumulate"] += 1

        def loss_sum(params: Params) -> tuple[Array, diagnostics.Stats]:
            logprobs, entropy = self._logprobs(params, batch)
            loss, clipped = losses.token_loss(
                logprobs,
                entropy,
                jnp.asarray(batch.behavior_logprobs),
                jnp.asarray(batch.advantages),
                jnp.asarray(batch.loss_mask),
                self._config.loss,
            )
            stats = diagnostics.measure(batch, logprobs=logprobs, entropy=entropy, clipped=clipped, step=step)
            return jnp.sum(loss * batch.token_weights), stats

        (loss, stats), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        return Accumulator(
            grads=jax.tree.map(lambda total, g: total + g, accumulator.grads, grads),
            denominator=accumulator.denominator + batch.denominator,
            loss=accumulator.loss + loss,
            stats=diagnostics.merge(accumulator.stats, stats),
        )

    def _apply(self, state: TrainState) -> tuple[TrainState, Metrics]:
        self._num_traces["apply"] += 1
        total = state.accumulator
        grads = jax.tree.map(lambda g: g / total.denominator, total.grads)
        loss, grad_norm = total.loss / total.denominator, optax.tree.norm(grads)
        # 0 / 0 is not finite either, so an update without tokens is skipped too.
        is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # The optimizer's state keeps the parameters' dtype, so its input must have it.
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        count = state.step - state.skipped_updates
        skipped = state.skipped_updates + jnp.where(is_good, 0, 1)
        metrics = diagnostics.finalize(total.stats) | {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(count, self._config.optimizer, num_updates=self._config.run.num_updates),
            "skipped_updates": skipped,
        }
        new_state = TrainState(
            params=params,
            opt_state=opt_state,
            step=state.step + 1,
            skipped_updates=skipped,
            accumulator=Accumulator.zeros(params),
        )
        return new_state, metrics

    def _logprobs(self, params: Params, batch: PackedBatch) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
        """Current logprobs and entropies, each at its token: the output at i - 1 predicts the token at i."""
        tokens = jnp.asarray(batch.tokens)
        hidden = self._forward(params, tokens, jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids))
        flat = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            output_head(params),
            jnp.roll(tokens, -1, axis=1).reshape(-1),
            temperature=self._config.sampling.temperature,
        )
        logprobs, entropy = (jnp.pad(x.reshape(tokens.shape)[:, :-1], ((0, 0), (1, 0))) for x in flat)
        return logprobs, entropy


def build_steps(model_config: ModelConfig, config: Config, mesh: Mesh) -> Steps:
    """The learner's device functions; see `Steps`.

    Raises:
      ValueError: the mesh does not divide packing.rows.
    """
    shards: Any = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.packing.rows % shards:
        raise ValueError(f"packing.rows ({config.packing.rows}) must be a multiple of data * fsdp ({shards})")
    return Steps(model_config, config, mesh)
