"""Frozen policies that a loss compares with: the KL reference, and the proximal policy; copies, scores, memory.

Each is a copy of parameters, split over the mesh like the learner's own, kernels in the compute dtype, which is what
the learner multiplies with too. A micro-batch is scored by them once, in the first pass over its batch. With adapters
the reference is the base with the adapters off, of which there is no second copy, and the policy last published is a
copy of the adapters.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float32

from bridge.param_names import flatten, unflatten
from configs.schema import Config
from learner.model.decoder import Params
from learner.objective import losses
from learner.update.packing import PackedBatch

ProximalPolicy = Literal["frozen", "first_pass", "current"]
"""Whose logprobs are pi_prox's: a frozen policy's; the policy's own in the first pass over a batch, there the current
ones, held constant, and in the later passes those; or the current ones, always, where a batch has one pass."""


def proximal_policy(config: Config) -> ProximalPolicy | None:
    """Which one a run's loss is given; None where it needs none."""
    if not losses.needs(config.loss).proximal:
        return None
    if config.steps_per_proximal > config.rounds.epochs:
        return "frozen"
    return "first_pass" if config.rounds.epochs > 1 else "current"


def loads_reference(config: Config) -> bool:
    """Whether the reference is a model of its own: with adapters it is their base, unless another one is named."""
    return losses.needs(config.loss).reference and (not config.lora.is_on or bool(config.loss.reference_path))


def freeze(params: Params, config: Config) -> Params:
    """A copy in the compute dtype, but for the norms' scales, which are used as they are kept; pure, to be jitted."""

    def one(path: str, x: jax.Array) -> jax.Array:
        return x + 0 if path.endswith("/scale") else x.astype(config.model.compute_dtype) + 0

    return unflatten({path: one(path, x) for path, x in flatten(params).items()})


def frozen_bytes(params: Params, trained: Params, config: Config) -> int:
    """Bytes of all that a run keeps frozen: the base of adapters, the reference, the proximal policy.

    As `learner.restore` loads the first two, and `FrozenPolicies` makes the last.

    Args:
      params: the model's, arrays or their shapes.
      trained: those of them that are trained, or adapters.
      config: the run's.
    """
    num_all = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    total = 0
    if config.lora.is_on:
        total += num_all * width(config.base_dtype)
    if loads_reference(config):
        total += num_all * width(config.model.compute_dtype)
    if proximal_policy(config) == "frozen":
        total += num_bytes(jax.eval_shape(lambda tree: freeze(tree, config), trained))
    return total


def num_bytes(tree: Any) -> int:
    """Of arrays, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def width(dtype: str) -> int:
    """Bytes of a number of a configuration's dtype."""
    return 4 if dtype == "float32" else 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenLogprobs:
    """A micro-batch's logprobs under the policies that the loss compares with; None where it needs none."""

    reference: Float32[Array | np.ndarray, "B S"] | None = None
    proximal: Float32[Array | np.ndarray, "B S"] | None = None
    """Of pi_prox; None in the first pass over a batch where that is the policy itself (`TrainStep.keeps_logprobs`)."""


NO_FROZEN = FrozenLogprobs()


class Scorer(Protocol):
    """What of a train step frozen policies use."""

    def score(self, params: Params, batch: PackedBatch, base: Params | None = None) -> Float32[Array, "B S"]:
        """The batch's logprobs."""
        ...

    def score_base(self, base: Params, batch: PackedBatch) -> Float32[Array, "B S"]:
        """The same with adapters off."""
        ...


class FrozenPolicies:
    """The frozen policies that the configured loss needs; none for most."""

    def __init__(
        self,
        steps: Scorer,
        config: Config,
        *,
        load_reference: Callable[[], Params],
        params: Params,
        base: Params | None = None,
    ) -> None:
        """Loads the reference and freezes the proximal policy, where the loss needs them.

        Args:
          steps: the train step.
          config: the run's.
          load_reference: reads the reference's parameters in the compute dtype, split like the learner's.
          params: the learner's, which are published next.
          base: what they belong to, if they are adapters; it may be the reference.
        """
        self._steps, self._base = steps, base
        # Without donation nothing is taken over: the optimizer may step the learner's own from here on.
        self._freeze = jax.jit(lambda tree: freeze(tree, config))
        self._reference = load_reference() if losses.needs(config.loss).reference else None
        self._keeps_proximal = proximal_policy(config) == "frozen"
        self._proximal: Params | None = None
        self.publish(params)

    def publish(self, params: Params) -> None:
        """Takes the learner's parameters, published just now, as the proximal policy, if the loss keeps one.

        By rounds weights go out where a round begins, so these are the round's as well.
        """
        if self._keeps_proximal:
            self._proximal = None  # first, so that no two copies are there at once
            self._proximal = self._freeze(params)

    def score(self, batch: PackedBatch) -> FrozenLogprobs:
        """The batch's logprobs under each frozen policy, on the devices."""
        reference, proximal = self._reference, self._proximal
        return FrozenLogprobs(
            reference=None if reference is None else self._score_reference(reference, batch),
            proximal=None if proximal is None else self._steps.score(proximal, batch, self._base),
        )

    def _score_reference(self, reference: Params, batch: PackedBatch) -> jax.Array:
        score = self._steps.score if self._base is None else self._steps.score_base
        return score(reference, batch)
