"""Jitted train step: accumulate, apply, score.

An update's gradient is sum_t w_t dl_t / sum(denominators). `accumulate` adds to the sums, and `apply` divides once. The
gradient therefore depends neither on the split of the tokens into micro-batches nor on their order. With several epochs
an update repeats this with the same micro-batches, with one `apply` per epoch.

Every function is compiled once per batch shape, with explicit shardings, and none waits for a device. A run has one
shape, or a few with packing.auto (`auto_shape.py`). `num_compilations` counts the traces and is a metric: 2 in a
healthy run of one shape, and one more per further shape.

Donation: `accumulate` donates only the accumulator, so an export may read the parameters meanwhile. `apply` donates the
whole state: no reference to its parameters may be used after that call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from bridge.param_names import combine
from configs.schema import Config
from learner.distributed.channel import Processes, SingleProcess
from learner.distributed.sharding import (
    BatchBroadcast,
    abstract,
    batch_sharding,
    compiler_options,
    param_shardings,
    placed,
    put,
    replicated,
    shardings,
)
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params
from learner.model.logprobs import TopTokens
from learner.model.lora import abstract_adapters, check_lora, init_adapters
from learner.model.routing_replay import routing_shape
from learner.objective import losses
from learner.update import diagnostics
from learner.update.auto_remat import Policy
from learner.update.compilations import Compilations
from learner.update.frozen_policies import NO_FROZEN, FrozenLogprobs, proximal_policy
from learner.update.loss_fn import attention_paths, make_loss_fn, without_adapters
from learner.update.optimizer import Accumulator, ApplyUpdate, Metrics, TrainState, init_state, make_optimizer
from learner.update.packing import PackedBatch, empty_batch


class TrainStep:
    """Device functions of the learner for one model, configuration and mesh."""

    def __init__(self, model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes | None = None) -> None:
        """Prepares the functions without compiling them; `hosts` is None for a single process."""
        self._config, self._model_config = config, model_config
        self.needs = losses.needs(config.loss)
        proximal = proximal_policy(config)
        self.scores_proximal = proximal == "frozen"
        """True if the proximal logprobs are from frozen parameters."""
        self.keeps_logprobs = proximal == "first_pass"
        """True if the proximal logprobs are the policy's own of the first epoch over a batch, from `logprobs`."""
        self.spreads = mesh.is_multi_process
        """True if a batch is only in the leader's memory until `spread`."""
        num_steps = config.run.num_updates * config.rounds.epochs
        self._optimizer = make_optimizer(config.optimizer, num_steps=num_steps, mesh=mesh)
        self._apply_update = ApplyUpdate(
            optimizer=self._optimizer,
            config=config.optimizer,
            epochs=config.rounds.epochs,
            num_steps=num_steps,
            seed=config.run.seed,
            finalize=functools.partial(diagnostics.finalize, corrects=config.loss.correction.is_on),
        )
        self._loss_sum = make_loss_fn(model_config, config, mesh, hosts or SingleProcess())
        self._reference_loss_fn = without_adapters(self._loss_sum, model_config, config, mesh)
        self.compilations = Compilations()
        """Compilations of the learner's steps; the critic's are counted in addition."""
        self.pending: Array | None = None
        """Ready when the last `accumulate` is done; never donated, so a caller can wait for it at any time."""
        self.logprobs: Float32[Array, "B S"] | None = None
        """Logprobs of the trained tokens in the last `accumulate`; None unless `keeps_logprobs`."""
        self._shape_arguments(mesh)
        self._jit(mesh)

    def _shape_arguments(self, mesh: Mesh) -> None:
        """Sets the functions' arguments as `jax.ShapeDtypeStruct` with shardings."""
        rows, whole = batch_sharding(mesh), replicated(mesh)
        lora, dtype = self._config.lora, self._config.model.param_dtype
        params = abstract_params(self._model_config, self._config.base_dtype if lora.is_on else dtype)
        self._base = placed(params, param_shardings(params, mesh)) if lora.is_on else None
        """Frozen base of the adapters; None if all parameters are trained."""
        if lora.is_on:
            params = abstract_adapters(self._model_config, lora, dtype)
        state = jax.eval_shape(lambda p: init_state(p, self._optimizer), params)
        self._state = placed(state, param_shardings(state, mesh))
        self.routing = routing_shape(self._config, self._model_config)
        """Sizes of the routing that batches hold; None without model.routing_replay."""
        batch = jax.tree.map(abstract, empty_batch(self._config.packing, self.routing))
        self._batch = placed(batch, jax.tree.map(lambda x: rows if x.ndim else whole, batch))
        self._mesh = mesh
        self._spread: dict[tuple[int, ...], BatchBroadcast] = {}
        """Broadcast by the batch's rows and tokens: one, or a few with packing.auto."""
        of_tokens = self._batch.advantages
        shape = (*of_tokens.shape, self._config.loss.teacher_top_k)
        of_top = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]
        self._anchors = FrozenLogprobs(
            reference=of_tokens if self.needs.reference else None,
            teacher=of_tokens if self.needs.teacher else None,
            top=TopTokens(*placed(of_top, [rows, rows])) if self.needs.divergence else None,
            proximal=of_tokens if self.scores_proximal or self.keeps_logprobs else None,
        )

    def _jit(self, mesh: Mesh) -> None:
        rows, whole, options = batch_sharding(mesh), replicated(mesh), compiler_options(mesh)
        state, batch, anchors = (shardings(tree) for tree in (self._state, self._batch, self._anchors))
        base = None if self._base is None else shardings(self._base)
        lora, dtype = self._config.lora, self._config.model.param_dtype
        self._init_adapters = jax.jit(
            lambda key: init_adapters(self._model_config, lora, key, dtype), out_shardings=state.params
        )
        self._init_rest = jax.jit(
            lambda p: dataclasses.replace(init_state(p, self._optimizer), params=None),
            out_shardings=dataclasses.replace(state, params=None),
        )
        self._zeros = jax.jit(lambda: Accumulator.zeros(self._state.params), out_shardings=state.accumulator)
        self._jit_accumulate = jax.jit(
            self._accumulate,
            in_shardings=(state.accumulator, state.params, base, whole, batch, anchors, whole),
            out_shardings=(state.accumulator, whole, rows),
            donate_argnums=0,
            compiler_options=options,
        )
        self._jit_merge = jax.jit(
            lambda total, part: total + part,
            in_shardings=(state.accumulator, state.accumulator),
            out_shardings=state.accumulator,
            donate_argnums=0,
            compiler_options=options,
        )
        self._jit_apply = jax.jit(
            self._apply,
            in_shardings=(state, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
            compiler_options=options,
        )
        self._jit_score = jax.jit(
            self._loss_sum.score,
            in_shardings=(combine_params(base, state.params), batch),
            out_shardings=rows,
            compiler_options=options,
        )
        self._jit_score_base = jax.jit(
            self._reference_loss_fn.score, in_shardings=(base, batch), out_shardings=rows, compiler_options=options
        )

    @property
    def remat(self) -> Policy:
        """Rematerialization policy of the backward pass: `model.remat`, or the choice of auto."""
        return self._loss_sum.remat

    @property
    def num_compilations(self) -> int:
        """Cumulative number of traces of `accumulate` and `apply`: 2 in a healthy run of one shape, 4 with a critic."""
        return self.compilations.total

    def init(self, params: Params) -> TrainState:
        """Returns a new state from parameters, spread over the mesh if necessary.

        Arrays already in place are used without a copy: the first `apply` donates them.
        """
        spread = jax.device_put(params, shardings(self._state.params))
        return dataclasses.replace(self._init_rest(spread), params=spread)

    def init_adapters(self) -> Params:
        """Returns adapters that change nothing yet, spread over the mesh; deterministic in `run.seed`."""
        return self._init_adapters(jax.random.key(self._config.run.seed))

    def abstract_state(self) -> TrainState:
        """Returns the state as `jax.ShapeDtypeStruct` with shardings, into which a checkpoint is restored."""
        return self._state

    def abstract_batch(self) -> PackedBatch:
        """Returns a batch as `jax.ShapeDtypeStruct` with shardings."""
        return self._batch

    def abstract_base(self) -> Params | None:
        """Returns the frozen base of the adapters as `jax.ShapeDtypeStruct`; None if all parameters are trained."""
        return self._base

    def zero_accumulator(self) -> Accumulator:
        """Returns an empty accumulator, for a state restored from a checkpoint without it."""
        return self._zeros()

    def spread(self, batch: PackedBatch) -> PackedBatch:
        """Spreads the leader's batch, on the host, over the mesh; the batches of other processes are not read."""
        if not self.spreads:
            return self.put(batch)
        shape = np.shape(batch.tokens)
        if shape not in self._spread:
            shapes = jax.tree.map(abstract, batch)
            self._spread[shape] = BatchBroadcast(placed(shapes, shardings(self._batch)), self._mesh)
        return self._spread[shape](batch)

    def put(self, batch: PackedBatch) -> PackedBatch:
        """Spreads a batch over the mesh; every process passes the same batch."""
        return jax.tree.map(put, batch, shardings(self._batch))

    def accumulate(
        self,
        state: TrainState,
        batch: PackedBatch,
        anchors: FrozenLogprobs = NO_FROZEN,
        base: Params | None = None,
    ) -> TrainState:
        """Adds a micro-batch to the optimizer step in progress; donates the accumulator.

        With `keeps_logprobs`, a call without proximal logprobs is the first epoch over the batch. `base` is the base of
        the state's adapters, if it has adapters. Raises ValueError if `anchors` does not have exactly the logprobs that
        the loss needs.
        """
        batch = self.put(batch)
        is_first = self.keeps_logprobs and anchors.proximal is None
        if is_first:  # not read in this case, but of the compiled shape
            anchors = dataclasses.replace(anchors, proximal=batch.behavior_logprobs)
        if jax.tree.structure(anchors) != jax.tree.structure(self._anchors):
            raise ValueError(
                f"loss {self._config.loss.name}: expected logprobs with reference={self.needs.reference}, "
                f"teacher={self.needs.teacher}, top={self.needs.divergence} and proximal={self.scores_proximal}, got "
                f"{jax.tree.map(jnp.shape, anchors)}; see learner.update.frozen_policies"
            )
        anchors = jax.tree.map(put, anchors, shardings(self._anchors))
        with self.compilations.reported("accumulate", batch):
            accumulator, self.pending, self.logprobs = self._jit_accumulate(
                state.accumulator, state.params, base, state.step, batch, anchors, np.bool_(is_first)
            )
        return dataclasses.replace(state, accumulator=accumulator)

    def merge(self, state: TrainState, part: Accumulator) -> TrainState:
        """Adds the sums of other micro-batches of the update, with the same parameters; donates the accumulator."""
        return dataclasses.replace(state, accumulator=self._jit_merge(state.accumulator, part))

    def denominator(self, state: TrainState) -> float:
        """Returns the divisor of the accumulated sums; waits for the device."""
        return float(state.accumulator.denominator)

    def apply(self, state: TrainState, epoch: int = 0) -> tuple[TrainState, Metrics]:
        """Steps the optimizer and empties the accumulator; donates the state.

        A loss or gradient that is not finite, and sums without trained tokens, leave parameters and optimizer state
        bit-identical and count in `skipped_updates`. The step advances in any case, with the last of rounds.epochs
        epochs over a batch. `epoch` is the epoch's number, from 0. Metrics stay on the device.
        """
        with self.compilations.reported("apply"):
            return self._jit_apply(state, np.int32(epoch))

    def ess(self, state: TrainState) -> float:
        """Returns the effective sample size of the accumulated tokens (PipelineRL eq. 6); waits for the device."""
        return float(diagnostics.finalize(jax.device_get(state.accumulator.stats))["ess"])

    def discard(self, state: TrainState) -> TrainState:
        """Discards the accumulated sums; the update is filled again."""
        return dataclasses.replace(state, accumulator=self._zeros())

    def score(self, params: Params, batch: PackedBatch, base: Params | None = None) -> Float32[Array, "B S"]:
        """Returns log pi of each trained token given its predecessors, at its own position; 0 elsewhere.

        `params` is like the state's; `base` is the base of the parameters if they are adapters.
        """
        return self._jit_score(combine_params(base, params), self.put(batch))

    def score_base(self, base: Params, batch: PackedBatch) -> Float32[Array, "B S"]:
        """Returns the logprobs of `score` without adapters, for a reference: the base, or a model of its shape."""
        return self._jit_score_base(base, self.put(batch))

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Returns the functions that a run executes, lowered for the mesh's devices from shapes alone.

        They are accumulate and apply, and score if the loss needs a frozen policy's logprobs.
        """
        state = self._state
        lowered = {
            "accumulate": self._jit_accumulate.lower(
                state.accumulator, state.params, self._base, state.step, self._batch, self._anchors, np.bool_(True)
            ),
            "apply": self._jit_apply.lower(state, np.int32(0)),
        }
        if self._base is not None and self.needs.reference:
            lowered["score"] = self._jit_score_base.lower(self._base, self._batch)
        elif self.scores_proximal or self.needs.reference:
            dtype = jnp.dtype(self._config.model.compute_dtype)
            frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), state.params)
            lowered["score"] = self._jit_score.lower(combine_params(self._base, frozen), self._batch)
        return lowered

    def _accumulate(
        self,
        accumulator: Accumulator,
        params: Params,
        base: Params | None,
        step: Array,
        batch: PackedBatch,
        anchors: FrozenLogprobs,
        is_first: Array,
    ) -> tuple[Accumulator, Array, Float[Array, "B S"] | None]:
        self.compilations.count("accumulate")

        def loss_sum(params: Params) -> Any:
            return self._loss_sum(combine_params(base, params), step, batch, anchors, is_first)

        (loss, (stats, logprobs, rejected)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        # Split like the parameters, so that XLA uses reduce-scatter instead of all-reduce.
        grads = jax.lax.with_sharding_constraint(grads, shardings(self._state.params))
        divisor = jnp.asarray(batch.denominator)
        own = Accumulator(grads=grads, denominator=divisor, rejected=rejected, loss=loss, stats=stats)
        return accumulator + own, loss, logprobs if self.keeps_logprobs else None

    def _apply(self, state: TrainState, epoch: Array) -> tuple[TrainState, Metrics]:
        self.compilations.count("apply")
        return self._apply_update(state, epoch)


def combine_params(base: Params | None, params: Params) -> Params:
    """Returns the decoder's parameters: the trained ones, combined with the base if they are adapters."""
    return params if base is None else combine(base, params)


def build_train_step(
    model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes | None = None
) -> TrainStep:
    """Returns the learner's device functions; all processes call it and agree on the program.

    Raises ProcessLostError if another process did not join, and ValueError like `attention_paths`, or if the model does
    not support the adapters.
    """
    check_lora(config.lora, model_config, publishes_adapters=config.publishes_adapters)
    # By default JAX multiplies float32 in TF32 on a GPU and in bfloat16 on a TPU; engines do not.
    jax.config.update("jax_default_matmul_precision", "highest" if config.model.compute_dtype == "float32" else None)
    paths = attention_paths(model_config, config, mesh)
    steps = TrainStep(model_config, config, mesh, hosts)
    for window, path in paths.items():
        logging.info("attention path=%s window=%s remat=%s", path, window, steps.remat)
    return steps
