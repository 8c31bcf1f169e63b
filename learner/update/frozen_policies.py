"""Frozen policies that a loss compares with: the KL reference, the proximal policy and teachers.

Each is a copy of parameters, split over the mesh like the learner's, with kernels in the compute dtype. They score each
micro-batch once, in the first epoch over its batch. With adapters the reference is the base with the adapters off,
which needs no copy, and the proximal policy is a copy of the adapters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from bridge.param_names import flatten, unflatten
from configs.schema import Config
from learner.distributed.sharding import batch_sharding, compiler_options
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params
from learner.model.logprobs import TopTokens
from learner.objective import losses
from learner.update.packing import PackedBatch

ProximalPolicy = Literal["frozen", "first_pass", "current"]
"""Source of pi_prox's logprobs. `frozen`: a frozen policy. `first_pass`: the policy's own in the first epoch over a
batch, also for the later epochs. `current`: the policy's current ones, for batches with one epoch."""


def proximal_policy(config: Config) -> ProximalPolicy | None:
    """Returns the source of the proximal logprobs; None if the loss needs none."""
    if not losses.needs(config.loss).proximal:
        return None
    if config.steps_per_proximal > config.rounds.epochs:
        return "frozen"
    return "first_pass" if config.rounds.epochs > 1 else "current"


def loads_reference(config: Config) -> bool:
    """Returns True if the reference is loaded separately; with adapters it is their base unless a path is set."""
    return losses.needs(config.loss).reference and (not config.lora.is_on or bool(config.loss.reference_path))


def freeze(params: Params, config: Config) -> Params:
    """Copies parameters to the compute dtype, except the norms' scales, which keep their dtype; pure, for jit."""

    def one(path: str, x: jax.Array) -> jax.Array:
        return x + 0 if path.endswith("/scale") else x.astype(config.model.compute_dtype) + 0

    return unflatten({path: one(path, x) for path, x in flatten(params).items()})


def frozen_bytes(params: Params, trained: Params, config: Config) -> int:
    """Returns the bytes of a run's frozen weights: teachers, the base of adapters, the reference, the proximal policy.

    `learner.restore` loads all but the last, which `FrozenPolicies` makes. `params` are those of the model, arrays or
    their shapes; `trained` are the trained ones, or adapters.
    """
    num_all = sum(math.prod(x.shape) for x in jax.tree.leaves(params))

    def frozen(tree: Params) -> int:
        return num_bytes(jax.eval_shape(lambda tree: freeze(tree, config), tree))

    total = sum(
        num_bytes(abstract_params(Architecture.from_hf(folder), config.model.compute_dtype))
        for _, folder in config.loss.teacher_folders.values()
    )
    if config.lora.is_on:
        total += num_all * width(config.base_dtype)
    if loads_reference(config):
        total += frozen(params)
    if proximal_policy(config) == "frozen":
        total += frozen(trained)
    return total


def num_bytes(tree: Any) -> int:
    """Returns the bytes of arrays, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def width(dtype: str) -> int:
    """Returns the bytes per number of a dtype in the config."""
    return 4 if dtype == "float32" else 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenLogprobs:
    """Logprobs of a micro-batch under the frozen policies; None for a policy that the loss does not need."""

    reference: Float32[Array | np.ndarray, "B S"] | None = None
    proximal: Float32[Array | np.ndarray, "B S"] | None = None
    """Logprobs of pi_prox; None in the first epoch over a batch with `TrainStep.keeps_logprobs`."""
    teacher: Float32[Array | np.ndarray, "B S"] | None = None
    """Logprobs of the token's teacher; not read at tokens without one."""
    top: TopTokens | None = None
    """The teacher's likeliest tokens in place of the token, where the loss compares distributions."""


NO_FROZEN = FrozenLogprobs()

FrozenParams = tuple[Params | None, Params | None, Params | None, list[Params]]


class Scorer(Protocol):
    """Scoring functions of a train step that frozen policies use."""

    def score(self, params: Params, batch: PackedBatch, base: Params | None = None) -> Float32[Array, "B S"]:
        """Returns the batch's logprobs."""
        ...

    def score_base(self, base: Params, batch: PackedBatch) -> Float32[Array, "B S"]:
        """Returns the batch's logprobs with the adapters off."""
        ...


class TeacherPolicy:
    """Teacher of on-policy distillation: frozen parameters and their scoring function."""

    def __init__(self, params: Params, score: Callable[[Params, PackedBatch], Any], mesh: Mesh) -> None:
        """Compiles nothing yet.

        `score` returns the logprobs of the trained tokens, [B, S], or `TopTokens`; 0 elsewhere; pure, for jit.
        """
        self.params = params

        def score_own(params: Params, batch: PackedBatch, number: Array) -> Array:
            mask = jnp.asarray(batch.loss_mask) & (jnp.asarray(batch.teacher_ids) == number)
            # A teacher routes by itself; the rollouts have the student's routing.
            return score(params, dataclasses.replace(batch, loss_mask=mask, routed_experts=None))

        self._score = jax.jit(score_own, out_shardings=batch_sharding(mesh), compiler_options=compiler_options(mesh))

    def score(self, batch: PackedBatch, number: int) -> Any:
        """Returns `score` at the trained tokens of teacher `number`; 0 elsewhere."""
        return self._score(self.params, batch, np.int8(number))


class FrozenPolicies:
    """Frozen policies of the configured loss; most losses need none."""

    def __init__(
        self,
        steps: Scorer,
        config: Config,
        *,
        load_reference: Callable[[], Params],
        params: Params,
        base: Params | None = None,
        teachers: Sequence[TeacherPolicy] = (),
    ) -> None:
        """Loads the reference and freezes the proximal policy, if the loss needs them.

        `load_reference` loads the reference's parameters in the dtypes of `freeze`, split like the learner's. `params`
        are published next. `base`, their base if they are adapters, may be the reference. `teachers` are those that the
        learner holds, in the order of their numbers (`LossConfig.teacher_folders`).
        """
        self._steps, self._base, self._teachers = steps, base, teachers
        # Without donation the copy shares no buffers with the learner's parameters, which the optimizer may then step.
        self._freeze = jax.jit(lambda tree: freeze(tree, config))
        self._reference = load_reference() if losses.needs(config.loss).reference else None
        self._needs, self._top_k = losses.needs(config.loss), config.loss.teacher_top_k
        self._keeps_proximal = proximal_policy(config) == "frozen"
        self._proximal: Params | None = None
        self.publish(params)

    def publish(self, params: Params) -> None:
        """Takes the parameters just published as the proximal policy, if the loss needs a frozen one.

        In round mode weights are published at the start of a round, so they are also the round's.
        """
        if self._keeps_proximal:
            self._proximal = None  # first, so that two copies never exist at the same time
            self._proximal = self._freeze(params)

    @property
    def params(self) -> FrozenParams:
        """Parameters of the reference, the proximal policy, the base of adapters and the teachers; None for no copy."""
        return self._reference, self._proximal, self._base, [teacher.params for teacher in self._teachers]

    @params.setter
    def params(self, params: FrozenParams) -> None:
        self._reference, self._proximal, self._base, of_teachers = params
        for teacher, own in zip(self._teachers, of_teachers, strict=True):
            teacher.params = own

    def score(self, batch: PackedBatch, teachers: Sequence[int] = ()) -> FrozenLogprobs:
        """Returns the batch's logprobs under each frozen policy, on the devices.

        `teachers` are the numbers of the teachers in the batch (`MicroBatch.teachers`).
        """
        reference, proximal = self._reference, self._proximal
        return FrozenLogprobs(
            reference=None if reference is None else self._score_reference(reference, batch),
            proximal=None if proximal is None else self._steps.score(proximal, batch, self._base),
            teacher=self._score_teachers(batch, teachers) if self._needs.teacher else None,
            top=self._top_of_teachers(batch, teachers) if self._needs.divergence else None,
        )

    def _score_teachers(self, batch: PackedBatch, numbers: Sequence[int]) -> Float32[Array | np.ndarray, "B S"]:
        own = [number for number in numbers if number <= len(self._teachers)]  # the others are on servers
        return sum((self._teachers[number - 1].score(batch, number) for number in own), start=batch.teacher_logprobs)

    def _top_of_teachers(self, batch: PackedBatch, numbers: Sequence[int]) -> TopTokens:
        parts = [self._teachers[number - 1].score(batch, number) for number in numbers]
        if not parts:
            shape = (*np.shape(batch.tokens), self._top_k)
            return TopTokens(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)

    def _score_reference(self, reference: Params, batch: PackedBatch) -> jax.Array:
        score = self._steps.score if self._base is None else self._steps.score_base
        if batch.routed_experts is not None:  # another model, which routes by itself
            batch = dataclasses.replace(batch, routed_experts=jnp.full_like(batch.routed_experts, -1))
        return score(reference, batch)
