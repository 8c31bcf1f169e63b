"""What a micro-batch takes of a device's memory beside the state, by what its backward pass recomputes. Pure, no jax.

An estimate from shapes, made to choose by and not to account with: XLA decides what really lives at once. It counts
what each policy of `learner.model.remat` keeps of every layer, one layer's working set, the head's chunk of logits,
and the gradients before they are accumulated. tests/learner/update/test_choose_remat.py compares it with XLA's own
memory analysis.
"""

import dataclasses
from typing import Literal

from learner.model.config import Architecture

Policy = Literal["full", "attention", "dots", "none"]

POLICIES: tuple[Policy, ...] = ("none", "dots", "attention", "full")
"""Those of `learner.model.remat.REMAT`, the one that keeps most first."""
CHOICES: tuple[Policy, ...] = ("dots", "attention", "full")
"""What auto chooses from. Not `none`: a layer's elementwise values cost more to put away and fetch again than to make,
1.08 times the time of `dots` for 16M parameters on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What of a micro-batch and of the model one device has."""

    num_tokens: int
    """Slots of the micro-batch, padding too."""
    activation_bytes: int
    """Of a number of the compute dtype."""
    tensor: int = 1
    """Devices that split a layer's width, its heads and the vocabulary."""
    param_shards: int = 1
    """Devices that split a parameter."""
    logit_chunk: int = 128
    """Tokens whose logits exist at once."""


def kept_per_token(config: Architecture, policy: Policy, tensor: int = 1) -> float:
    """Numbers that one layer keeps of a token from its forward to its backward pass.

    Raises:
      ValueError: no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"remat: got {policy!r}, wanted one of {POLICIES}")
    width, heads, keys = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.num_experts:
        copies, inner = config.num_experts_per_token, config.moe_intermediate_size
    else:
        copies, inner = 1, config.intermediate_size
    kept = float(width)
    if policy == "full":
        return kept
    kept += heads / tensor  # attention's output; its normaliser is one number a head
    if policy == "attention":
        return kept
    kept += (heads + 2 * keys) / tensor + width + copies * (2 * inner / tensor + width)
    if policy == "dots":
        return kept
    # Both norms' inputs and outputs, queries and keys before and after norm and rotation, gate, its sigmoid, product.
    return kept + 4 * width + 2 * (heads + keys) / tensor + copies * 3 * inner / tensor


def micro_batch_bytes(config: Architecture, policy: Policy, share: Share, *, num_params: int) -> float:
    """Bytes on one device at the fullest moment of `accumulate`, the state and its accumulator left out."""
    each = share.num_tokens * share.activation_bytes
    layers = config.num_layers * kept_per_token(config, policy, share.tensor) * each
    one_layer = 2 * kept_per_token(config, "none", share.tensor) * each
    words = -(-config.vocab_size // share.tensor)
    head = 4 * (4 * min(share.logit_chunk, share.num_tokens) * words + 2 * words * config.hidden_size)
    gradients = 4 * num_params / share.param_shards
    return layers + max(one_layer, head) + gradients
