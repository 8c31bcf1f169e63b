"""Frozen policies that a loss compares with: the KL reference, and the policy that was last published.

Each is a copy of parameters, split over the mesh like the learner's own, kernels in the compute dtype, which is what
the learner multiplies with too. A micro-batch is scored by them once, in the first pass over its batch.

With adapters the reference is the base with the adapters off, of which there is no second copy, and the policy last
published is a copy of the adapters.
"""

from collections.abc import Callable

import jax

from configs.schema import Config
from learner.model.decoder import Params
from learner.update.frozen_policies import FrozenLogprobs, freeze
from learner.update.packing import PackedBatch
from learner.update.train_step import TrainStep


class FrozenPolicies:
    """The frozen policies that the configured loss needs; none for most."""

    def __init__(
        self,
        steps: TrainStep,
        config: Config,
        *,
        load_reference: Callable[[], Params],
        params: Params,
        base: Params | None = None,
    ) -> None:
        """Loads the reference and freezes the proximal policy, where the loss needs them.

        Args:
          steps: scores, and says what is needed.
          config: the run's.
          load_reference: reads the reference's parameters in the compute dtype, split like the learner's.
          params: the learner's, which are published next.
          base: what they belong to, if they are adapters; it may be the reference.
        """
        self._steps, self._base = steps, base
        # Without donation nothing is taken over: the optimizer may step the learner's own from here on.
        self._freeze = jax.jit(lambda tree: freeze(tree, config))
        self._reference = load_reference() if steps.needs.reference else None
        self._proximal: Params | None = None
        self.publish(params)

    def publish(self, params: Params) -> None:
        """Takes the learner's parameters, published just now, as the proximal policy, if the loss keeps one.

        By rounds weights go out where a round begins, so these are the round's as well.
        """
        if self._steps.scores_proximal:
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
