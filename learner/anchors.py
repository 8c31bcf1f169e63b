"""Frozen policies that a loss compares with: the KL reference, and the proximal policy of a round.

Each is a copy of parameters in the compute dtype, split over the mesh like the learner's own. A micro-batch is
scored by them once, when it is trained.
"""

from collections.abc import Callable

import jax

from configs.schema import Config
from learner.packing import PackedBatch
from learner.state import Params
from learner.step import AnchorLogprobs, Steps


class Anchors:
    """The frozen policies that the configured loss needs; none for most."""

    def __init__(self, steps: Steps, config: Config, *, load_reference: Callable[[], Params], params: Params) -> None:
        """Loads the reference and freezes the proximal policy, where the loss needs them.

        Args:
          steps: scores, and says what is needed.
          config: the run's.
          load_reference: reads the reference's parameters, split like the learner's.
          params: the learner's, at the start of a round.
        """
        self._steps = steps
        # Without donation nothing is taken over: the optimizer may step the learner's own from here on.
        self._freeze = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(config.model.compute_dtype) + 0, tree))
        self._reference = self._freeze(load_reference()) if steps.needs.reference else None
        self._proximal: Params | None = None
        self.start_round(params)

    def start_round(self, params: Params) -> None:
        """Takes the learner's parameters as the proximal policy, if the loss wants the round's."""
        if self._steps.scores_proximal:
            self._proximal = self._freeze(params)

    def score(self, batch: PackedBatch) -> AnchorLogprobs:
        """The batch's logprobs under each frozen policy, on the devices."""

        def one(params: Params | None) -> jax.Array | None:
            return None if params is None else self._steps.score(params, batch)

        return AnchorLogprobs(reference=one(self._reference), proximal=one(self._proximal))
