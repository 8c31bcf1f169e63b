"""The parity fence: proves what the engines serve by a probe's logprobs against the learner's own.

Silently wrong weights are this field's most common serious bug: nothing crashes, only the ratios are off
(docs/publishing_and_proof.md). So right after a publish a few fresh responses are sampled, and the learner, whose
weights are still the ones it published, computes the same tokens' logprobs. An actor that is off by more than the
served dtype explains is fenced.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from bridge.types import Group, Ticket
from configs.sections import LossConfig, PackingConfig
from learner.publish.pinned import Pinned
from learner.update.packing import PackedBatch, pack_groups

_ANY_LOSS = LossConfig()
"""Packing wants a normalisation; nothing here reads what it gives."""


Score = Callable[[PackedBatch], Float32[np.ndarray, "B S"]]
"""log pi of a batch's trained tokens by the learner's current weights, in nats."""


def max_abs_dlogprob(score: Score, group: Group, packing: PackingConfig) -> float:
    """Largest |log pi - log mu| over a group's sampled tokens, in nats; the weights must be its version's."""
    worst = 0.0
    for micro in pack_groups([group], packing=packing, loss=_ANY_LOSS, max_response_tokens=1):
        logprobs = score(micro.batch)
        off = np.abs(logprobs - micro.batch.behavior_logprobs)[np.asarray(micro.batch.loss_mask)]
        worst = float(np.maximum(worst, off.max(initial=0.0)))  # a NaN stays one, and no bound holds
    return worst


def settle(
    probe: Pinned,
    *,
    score: Score,
    packing: PackingConfig,
    bound: float,
    fence: Callable[[str, str, float], None],
    before_score: Callable[[], None] = lambda: None,
) -> float:
    """Waits for the probe that is out; returns the largest |log pi - log mu| among the actors that pass, NaN of none.

    The parity fence: an actor over the bound may claim nothing more, and its groups are made again by
    others.

    Args:
      probe: what is out.
      score: the learner's own forward pass, by weights that are still the ones published.
      packing: the shape of a micro-batch.
      bound: nats; `Config.parity_bound`.
      fence: told the actor, the reason and by how many nats it is off.
      before_score: called when a group is back, before the forward pass, which may have to compile.
    """
    worst = 0.0

    def accept(group: Group, ticket: Ticket) -> bool:
        nonlocal worst
        del ticket
        before_score()
        off = max_abs_dlogprob(score, group, packing)
        if off <= bound:
            worst = max(worst, off)
            return True
        reason = f"its logprobs are off by {off:.3g} nats at version {probe.version}, the bound is {bound:.3g}"
        fence(group.actor, reason, off)
        return False

    return worst if probe.settle(accept) else float("nan")
