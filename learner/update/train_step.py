"""Jitted accumulate, apply, score; `TrainState`.

An update's gradient is sum_t w_t dl_t / sum(denominators). `accumulate` adds to the sums, `apply` divides
once, so the gradient depends neither on how the tokens were split into micro-batches nor on their order. Over several
epochs an update is as many such sums of the same micro-batches, an `apply` each.

Every function is compiled once for a batch shape, with explicit shardings; nothing in here waits for a device. A run
has one shape, with packing.auto a few (`row_shape`). `num_compilations` counts what was traced, and is a metric: 2 in a
healthy run of one shape, and one more for each further one.

Donation: `accumulate` donates the accumulator only and leaves the parameters' buffers alone, so an export may
read them meanwhile. `apply` donates the whole state: nobody may hold its parameters over that call.
"""

import collections
import contextlib
import ctypes
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from bridge.liveness import end_phase, report_phase
from bridge.param_names import combine
from configs.schema import Config
from learner.distributed.channel import Processes, SingleProcess
from learner.distributed.sharding import (
    BATCH_AXES,
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
from learner.model.attention.dispatch import choose_path
from learner.model.decoder import Params, abstract_params
from learner.model.lora import abstract_adapters, check_lora, init_adapters
from learner.objective import losses
from learner.update import diagnostics
from learner.update.frozen_policies import NO_FROZEN, FrozenLogprobs, proximal_policy
from learner.update.loss_fn import make_loss_fn, without_adapters
from learner.update.optimizer import Accumulator, ApplyUpdate, Metrics, TrainState, init_state, make_optimizer
from learner.update.packing import PackedBatch, empty_batch


def give_back_free_memory() -> None:
    """Returns what malloc holds and nobody uses to the system; does nothing where the C library has no such call.

    Compiling the learner's steps leaves some 300 MB behind, which would stay with the process for good.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


class TrainStep:
    """The learner's device functions for one model, configuration and mesh."""

    def __init__(self, model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes | None = None) -> None:
        """Compiles nothing yet; `hosts` are the learner's processes, this one alone if not given."""
        self._config = config
        self._model_config = model_config
        self.needs = losses.needs(config.loss)
        proximal = proximal_policy(config)
        self.scores_proximal = proximal == "frozen"
        """Whether the proximal logprobs come from frozen parameters."""
        self.keeps_logprobs = proximal == "first_pass"
        """Whether they are the policy's own of the first pass over a batch, from `logprobs`."""
        self.spreads = mesh.is_multi_process
        """Whether a batch is in the leader's memory alone, until `spread`."""
        num_steps = config.run.num_updates * config.rounds.epochs
        self._optimizer = make_optimizer(config.optimizer, num_steps=num_steps)
        self._apply_update = ApplyUpdate(
            optimizer=self._optimizer,
            config=config.optimizer,
            epochs=config.rounds.epochs,
            num_steps=num_steps,
            seed=config.run.seed,
        )
        self._loss_sum = make_loss_fn(model_config, config, mesh, hosts or SingleProcess())
        self._reference_loss_fn = without_adapters(self._loss_sum, model_config, config, mesh)
        self._num_traces: collections.Counter[str] = collections.Counter()
        self._num_tidied = 0
        self.pending: Array | None = None
        """Ready when the last `accumulate` is done; donated to nobody, so it can be waited for at any time."""
        self.logprobs: Float32[Array, "B S"] | None = None
        """The policy's in the last `accumulate`, of the trained tokens; None unless `keeps_logprobs`."""
        self._shape_arguments(mesh)
        self._jit(mesh)

    def _shape_arguments(self, mesh: Mesh) -> None:
        """What the functions below are called with, as `jax.ShapeDtypeStruct` with shardings."""
        rows, whole = batch_sharding(mesh), replicated(mesh)
        lora, dtype = self._config.lora, self._config.model.param_dtype
        params = abstract_params(self._model_config, self._config.base_dtype if lora.is_on else dtype)
        self._base = placed(params, param_shardings(params, mesh)) if lora.is_on else None
        """The frozen parameters beside the state's, which are adapters then; None where all are trained."""
        if lora.is_on:
            params = abstract_adapters(self._model_config, lora, dtype)
        state = jax.eval_shape(lambda p: init_state(p, self._optimizer), params)
        self._state = placed(state, param_shardings(state, mesh))
        batch = jax.tree.map(abstract, empty_batch(self._config.packing))
        self._batch = placed(batch, jax.tree.map(lambda x: rows if x.ndim else whole, batch))
        self._mesh = mesh
        self._spread: dict[tuple[int, ...], BatchBroadcast] = {}
        """By the batch's rows and tokens: one, or with packing.auto a few."""
        of_tokens = self._batch.advantages
        self._anchors = FrozenLogprobs(
            reference=of_tokens if self.needs.reference else None,
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
    def remat(self) -> str:
        """What the backward pass recomputes: `model.remat`, or what auto came to."""
        return self._loss_sum.remat

    @property
    def num_compilations(self) -> int:
        """How often `accumulate` and `apply` were traced; 2 in a healthy run of one shape."""
        return self._num_traces.total()

    def init(self, params: Params) -> TrainState:
        """A fresh state from parameters, spread over the mesh if they are not yet.

        Arrays that are in place already are taken over, not copied: the first `apply` donates them.
        """
        spread = jax.device_put(params, shardings(self._state.params))
        return dataclasses.replace(self._init_rest(spread), params=spread)

    def init_adapters(self) -> Params:
        """Adapters that change nothing yet, spread over the mesh; the same for one `run.seed`."""
        return self._init_adapters(jax.random.key(self._config.run.seed))

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct` with shardings: what a checkpoint is restored into."""
        return self._state

    def abstract_base(self) -> Params | None:
        """The frozen parameters beside the state's, where those are adapters, as `jax.ShapeDtypeStruct`."""
        return self._base

    def zero_accumulator(self) -> Accumulator:
        """An empty accumulator, for a state restored from a checkpoint that left it out."""
        return self._zeros()

    def spread(self, batch: PackedBatch) -> PackedBatch:
        """Spreads the leader's batch, on the host, over the mesh; what other processes pass is not read."""
        if not self.spreads:
            return self.put(batch)
        shape = np.shape(batch.tokens)
        if shape not in self._spread:
            shapes = jax.tree.map(abstract, batch)
            self._spread[shape] = BatchBroadcast(placed(shapes, shardings(self._batch)), self._mesh)
        return self._spread[shape](batch)

    def put(self, batch: PackedBatch) -> PackedBatch:
        """Spreads a batch over the mesh; every process passes the same one."""
        return jax.tree.map(put, batch, shardings(self._batch))

    def accumulate(
        self,
        state: TrainState,
        batch: PackedBatch,
        anchors: FrozenLogprobs = NO_FROZEN,
        base: Params | None = None,
    ) -> TrainState:
        """Adds a micro-batch to the optimizer step that is being filled; donates the accumulator.

        Without proximal logprobs, where `keeps_logprobs`, this is the first pass over the batch. `base` is what the
        state's adapters belong to, where it has adapters.

        Raises:
          ValueError: the loss needs the logprobs of a frozen policy, and `anchors` has none (or the other way round).
        """
        batch = self.put(batch)
        is_first = self.keeps_logprobs and anchors.proximal is None
        if is_first:  # not read then, but of the shape that is compiled
            anchors = dataclasses.replace(anchors, proximal=batch.behavior_logprobs)
        if jax.tree.structure(anchors) != jax.tree.structure(self._anchors):
            raise ValueError(
                f"loss {self._config.loss.name} wants reference={self.needs.reference} and "
                f"proximal={self.scores_proximal} logprobs, got {jax.tree.map(jnp.shape, anchors)}; "
                "see learner.update.frozen_policies"
            )
        anchors = jax.tree.map(put, anchors, shardings(self._anchors))
        with self._compiling("accumulate", batch):
            accumulator, self.pending, self.logprobs = self._jit_accumulate(
                state.accumulator, state.params, base, state.step, batch, anchors, np.bool_(is_first)
            )
        self._free_compiler_memory()
        return dataclasses.replace(state, accumulator=accumulator)

    def apply(self, state: TrainState, epoch: int = 0) -> tuple[TrainState, Metrics]:
        """Steps the optimizer and empties the accumulator; donates the state.

        A loss or gradient that is not finite, and sums without trained tokens, leave parameters and
        optimizer state bit-identical and count in `skipped_updates`; the step advances in any case, with the last of
        rounds.epochs passes over a batch, of which this is number `epoch`, from 0. Metrics stay on the device.
        """
        with self._compiling("apply"):
            result = self._jit_apply(state, np.int32(epoch))
        self._free_compiler_memory()
        return result

    def ess(self, state: TrainState) -> float:
        """The effective sample size, over tokens, of what is accumulated (PipelineRL eq. 6); waits for it."""
        return float(diagnostics.finalize(jax.device_get(state.accumulator.stats))["ess"])

    def discard(self, state: TrainState) -> TrainState:
        """Throws away what is accumulated; the update is filled anew."""
        return dataclasses.replace(state, accumulator=self._zeros())

    def score(self, params: Params, batch: PackedBatch, base: Params | None = None) -> Float32[Array, "B S"]:
        """Scores the trained tokens: log pi of each given those before it, at its own position; 0 elsewhere.

        `params` is like the state's; `base` what it belongs to, if it is adapters.
        """
        return self._jit_score(combine_params(base, params), self.put(batch))

    def score_base(self, base: Params, batch: PackedBatch) -> Float32[Array, "B S"]:
        """The same with the adapters off: a reference's, which is the base or another of its shape."""
        return self._jit_score_base(base, self.put(batch))

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """What a run executes, lowered for the mesh's devices from shapes alone.

        accumulate and apply, and score where the loss needs a frozen policy's logprobs.
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

    @contextlib.contextmanager
    def _compiling(self, name: str, batch: PackedBatch | None = None) -> Iterator[None]:
        """Says that a function is compiled, which may take minutes, at its first call; and then how long it took."""
        if self._num_traces[name]:
            yield
            return
        shape = "" if batch is None else f" ({' x '.join(map(str, batch.tokens.shape))} tokens)"
        report_phase(f"compiling {name}{shape}")
        start_s = time.monotonic()
        yield
        logging.info("compiled %s%s compile_s=%.1f", name, shape, time.monotonic() - start_s)
        end_phase()

    def _free_compiler_memory(self) -> None:
        """After a call that compiled, frees what the compiler left."""
        if self.num_compilations > self._num_tidied:
            self._num_tidied = self.num_compilations
            give_back_free_memory()

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
        self._num_traces["accumulate"] += 1

        def loss_sum(params: Params) -> Any:
            return self._loss_sum(combine_params(base, params), step, batch, anchors, is_first)

        (loss, (stats, logprobs)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        # Split like the parameters from here on, so that XLA reduces and scatters instead of reducing to all.
        grads = jax.lax.with_sharding_constraint(grads, shardings(self._state.params))
        total = Accumulator(
            grads=jax.tree.map(lambda total, g: total + g, accumulator.grads, grads),
            denominator=accumulator.denominator + batch.denominator,
            loss=accumulator.loss + loss,
            stats=diagnostics.merge(accumulator.stats, stats),
        )
        return total, loss, logprobs if self.keeps_logprobs else None

    def _apply(self, state: TrainState, epoch: Array) -> tuple[TrainState, Metrics]:
        self._num_traces["apply"] += 1
        return self._apply_update(state, epoch)


def combine_params(base: Params | None, params: Params) -> Params:
    """What the decoder applies: the trained parameters, with the frozen ones where those are adapters."""
    return params if base is None else combine(base, params)


def build_train_step(
    model_config: Architecture, config: Config, mesh: Mesh, hosts: Processes | None = None
) -> TrainStep:
    """The learner's device functions; see `TrainStep`. Of several processes all build theirs, and agree on the program.

    Raises:
      ProcessLostError: another process did not come.
      ValueError: the mesh does not divide the batch's rows or their tokens, or the model's heads or vocabulary; or
        model.attention can't serve this model on these devices; or the model can't have the adapters.
    """
    check_lora(config.lora, model_config, publishes_adapters=config.publishes_adapters)
    # By JAX's default a GPU multiplies float32 in TF32 and a TPU in bfloat16; engines don't.
    jax.config.update("jax_default_matmul_precision", "highest" if config.model.compute_dtype == "float32" else None)
    for name, size, parts in (
        ("packing.rows", config.packing.rows, math.prod(mesh.shape[a] for a in BATCH_AXES)),
        ("packing.row_tokens", config.packing.row_tokens, mesh.shape["sequence"]),
        ("the model's num_attention_heads", model_config.num_heads, mesh.shape["tensor"]),
        ("the model's vocab_size", model_config.vocab_size, mesh.shape["tensor"]),
    ):
        if size % parts:
            raise ValueError(f"{name} ({size}) must be a multiple of {parts}, the mesh being {dict(mesh.shape)}")
    steps = TrainStep(model_config, config, mesh, hosts)
    windows = {
        model_config.sliding_window if windowed else None for windowed in model_config.windowed_layers or (False,)
    }
    for window in windows:
        path = choose_path(
            config.model.attention,
            device=mesh.devices.flat[0],
            dtype=jnp.dtype(config.model.compute_dtype),
            head_dim=model_config.head_dim,
            window=window,
            soft_cap=model_config.attention_soft_cap,
            sequence=mesh.shape["sequence"],
            has_prefixes=config.packing.share_prompts,
        )
        logging.info("attention path=%s window=%s remat=%s", path, window, steps.remat)
    return steps
