"""What the backward pass recomputes of a layer, by name."""

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""The checkpoint name under which the splash and xla paths keep their output and softmax normaliser; cuDNN and Pallas
name nothing, so `attention` is `full` there."""

_POLICIES = jax.checkpoint_policies
_SAVE_ATTENTION = _POLICIES.save_only_these_names(ATTENTION)


def _checkpoint(policy: Callable[..., Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda layer: jax.checkpoint(layer, prevent_cse=False, policy=policy)


REMAT: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "full": _checkpoint(None),
    "attention": _checkpoint(_SAVE_ATTENTION),
    "dots": _checkpoint(_POLICIES.save_from_both_policies(_POLICIES.dots_with_no_batch_dims_saveable, _SAVE_ATTENTION)),
    "none": lambda layer: layer,
}
"""full: whole layers. attention: all but attention, whose cost grows with a row's length and whose result is only
[tokens, heads * head_dim] in the compute dtype a layer. dots: all but attention and the projections. none: nothing."""
