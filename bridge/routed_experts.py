"""Routing of an MoE model's tokens, as the engine chose it (docs/models.md)."""

import numpy as np
from jaxtyping import UInt
from msgspec import UNSET, UnsetType

from bridge.validation import is_array

RoutedExperts = UInt[np.ndarray, "R layers k"]
"""Experts of each token in each MoE layer, as the engine routed it (R3: Ma et al., 2025, arXiv 2510.11370): uint8, or
uint16 with more than 256 experts. Row i is of token i of prompt and response, in the forward pass that has it as input.
The last sampled token is no input, so R = P + T - 1."""


def extend_routing(earlier: RoutedExperts | UnsetType, later: RoutedExperts | UnsetType) -> RoutedExperts | UnsetType:
    """Returns the routing of a request and of its continuation, which computed all tokens again.

    A token keeps the routing of the request that sampled its successor. UNSET: not captured.
    """
    if later is UNSET or earlier is UNSET:
        return later
    return np.concatenate([earlier, later[len(earlier) :]])


def check_routing(routed_experts: object) -> None:
    """Raises ValueError unless the value is UNSET or can be the routing of some tokens."""
    if routed_experts is UNSET:
        return
    if not is_array(routed_experts) or routed_experts.ndim != 3 or routed_experts.dtype.name not in ("uint8", "uint16"):
        got = f"{routed_experts.dtype}{routed_experts.shape}" if is_array(routed_experts) else type(routed_experts)
        raise ValueError(f"routed_experts: expected uint8 or uint16 [R, layers, k], got {got}")
