"""Rollout routing replay (R3: Ma et al., 2025, arXiv 2510.11370): the learner uses the experts that the engine chose.

Engine and learner round differently, so near ties between experts are decided differently, and such a token's logprob
differs by far more than rounding. With replay the learner takes each token's experts from its rollout and only their
weights from its own router, through which the gradient flows (`learner.model.moe.route`).

The current and the proximal policy use the replayed experts, so that their ratio is over one subnetwork. The KL
reference uses its own router, because it is another model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int16
from msgspec import UNSET, UnsetType

from bridge.codec import MAX_BYTES
from bridge.rollout_types import Group
from bridge.routed_experts import RoutedExperts
from configs.schema import Config
from learner.model.architecture import Architecture

_TOKEN_BYTES = 16
"""Bytes per token of the other arrays of a message (`bridge.progress_types`)."""
MAX_COUNTED = 256
"""Most tokens per response, evenly spaced, of which `ExpertLoad` counts the experts: enough for 1% accuracy."""


class RoutingShape(NamedTuple):
    """Sizes of a model's routing."""

    num_layers: int
    num_per_token: int
    num_experts: int

    @property
    def token_bytes(self) -> int:
        """Bytes per token in a rollout."""
        return self.num_layers * self.num_per_token * (1 if self.num_experts <= 256 else 2)

    def nothing(self, rows: int, tokens: int) -> Int16[np.ndarray, "rows tokens layers k"]:
        """Returns the routing of a batch without captured routing: -1 lets the learner's router decide."""
        return np.full((rows, tokens, self.num_layers, self.num_per_token), -1, np.int16)

    def fits(self, routed_experts: RoutedExperts | UnsetType) -> bool:
        """Returns True if a rollout's routing is possible: not captured, or k distinct experts in each layer."""
        if routed_experts is UNSET:
            return True
        return (
            routed_experts.shape[1:] == (self.num_layers, self.num_per_token)
            and int(routed_experts.max(initial=0)) < self.num_experts
            and bool(np.all(np.diff(np.sort(routed_experts, axis=-1).astype(np.int32), axis=-1)))
        )


def routing_shape(config: Config, architecture: Architecture) -> RoutingShape | None:
    """Returns the sizes of the routing that a run replays; None if it replays none.

    Raises ValueError if the model is dense, or a message with the longest responses would exceed `codec.MAX_BYTES`.
    """
    if not config.model.routing_replay:
        return None
    if not architecture.num_experts:
        raise ValueError("model.routing_replay: expected a mixture-of-experts model, got a dense one. Set it to False")
    shape = RoutingShape(architecture.num_layers, architecture.num_experts_per_token, architecture.num_experts)
    num_sequences = 1 if config.admission.unit == "sample" else config.rounds.requests_per_group
    num_bytes = num_sequences * config.model.max_tokens * (shape.token_bytes + _TOKEN_BYTES)
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"model.routing_replay: a group of {num_sequences} sequences of model.max_tokens may have "
            f"{num_bytes / 2**20:.0f} MiB with its routing, expected at most {MAX_BYTES / 2**20:.0f}. Set "
            "admission.unit=sample, or lower model.max_tokens or rounds.samples_per_group"
        )
    return shape


class ExpertLoad:
    """Accumulator of how an update's tokens load the experts, by the routing in its rollouts."""

    def __init__(self, shape: RoutingShape) -> None:
        self._shape = shape
        self.clear()

    def clear(self) -> None:
        """Discards the counts."""
        self._counts = np.zeros(self._shape.num_layers * self._shape.num_experts, np.int64)
        self._num_rollouts = self._num_captured = 0

    def add(self, group: Group) -> None:
        """Adds a trained group."""
        first_of_layer = np.arange(self._shape.num_layers)[:, None] * self._shape.num_experts
        for rollout in group.rollouts:
            self._num_rollouts += 1
            if rollout.routed_experts is not UNSET:
                self._num_captured += 1
                some = rollout.routed_experts[:: -(-len(rollout.routed_experts) // MAX_COUNTED)]
                self._counts += np.bincount((some + first_of_layer).reshape(-1), minlength=self._counts.size)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics, named as in learner/metrics/metric_names.py."""
        counts = self._counts.reshape(self._shape.num_layers, self._shape.num_experts)
        found = {"routing/captured": self._num_captured / max(self._num_rollouts, 1)}
        if self._num_captured:
            load = counts / counts.sum(-1, keepdims=True)
            entropy = -np.sum(load * np.log(np.where(load > 0, load, 1.0)), -1) / np.log(self._shape.num_experts)
            found["routing/max_load"] = float(load.max() * self._shape.num_experts)
            found["routing/load_entropy"] = float(entropy.mean())
        return found
