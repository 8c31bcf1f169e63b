"""Validation of an arrived group against the run, before it may train. Pure.

The wire types reject groups that contradict themselves. This module rejects groups that contradict the run: its model,
its limits, the ticket, the learner's version. Such a group is from a broken actor or verifier. It would not crash the
learner, but silently corrupt training: a wrong embedding, a ratio of 0, a vanishing advantage.
"""

import collections
import dataclasses
import math

import numpy as np
from msgspec import UNSET

from bridge.rollout_types import MAX_ABS_REWARD, Group, Rollout, Ticket, Version
from learner.model.routing_replay import RoutingShape

MIN_LOGPROB = math.log(2.0**-149) - 0.5
"""Lowest valid logprob, in nats. Sampling uses probabilities in float32, whose smallest number is 2^-149, with a
logarithm of -103.3. The rest is tolerance for rounding."""

MAX_REFUSED_IN_A_ROW = 8
"""Consecutive rejected groups of an actor after which it is fenced."""

REASONS = {
    "wrong_size": "number of responses differs from the ticket's",
    "out_of_vocabulary": "a token id outside the model's vocabulary",
    "too_long": "a response, observed tokens included, over its ticket's max_tokens, or over model.max_tokens with "
    "its prompt",
    "future_version": "weights newer than the learner's",
    "impossible_logprob": f"a behavior logprob below {MIN_LOGPROB:.0f}, which no sampled token can have",
    "impossible_routing": "routed experts of another model, or the same expert twice for one token",
    "missing_teacher": "no logprobs of its teacher on a server (loss.teacher_url)",
    "extreme_reward": f"a reward, of a response or a turn, beyond {MAX_ABS_REWARD:g}, too large for float32 advantages",
}
"""Reasons of rejection and their meanings; each is counted as `groups/<reason>`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """Limits of a run's groups."""

    vocab_size: int
    """Vocabulary size of the model: rows of its embedding."""
    max_tokens: int
    """Maximum tokens of prompt and response together (`model.max_tokens`)."""
    routing: RoutingShape | None = None
    """Sizes of the routing that is replayed; None if it is not read."""
    server_teachers: frozenset[str] = frozenset()
    """Names of the teachers on servers (`LossConfig.teacher_urls`)."""


@dataclasses.dataclass(frozen=True)
class InvalidGroup:
    """Reason for which a group is invalid, and its actors."""

    reason: str
    """Key of `REASONS`."""
    actors: frozenset[str]
    """Names of the actors that made the invalid rollouts."""


def objection(group: Group, ticket: Ticket, limits: GroupLimits, *, newest: Version) -> InvalidGroup | None:
    """Returns why a group, with the ticket's id and prompt, is invalid; None if it is valid.

    `newest` is the learner's version. Groups of an abandoned incarnation may be newer; filter them before.
    """
    if len(group.rollouts) != ticket.num_samples:
        return InvalidGroup("wrong_size", group.actors)
    if _is_out_of_vocabulary(group.prompt_tokens, limits):
        return InvalidGroup("out_of_vocabulary", group.actors)
    if group.incarnation > newest.incarnation:
        return InvalidGroup("future_version", group.actors)
    found = [
        (reason, maker)
        for rollout, maker in zip(group.rollouts, group.makers, strict=True)
        if (reason := _rollout_objection(rollout, group.prompt_tokens.size, ticket, limits, newest.step))
    ]
    names = frozenset(name for _, maker in found for name in maker.split("&"))
    return InvalidGroup(found[0][0], names) if found else None


class RejectionCounter:
    """Consecutive rejected groups of each actor."""

    def __init__(self) -> None:
        self._in_a_row: collections.Counter[str] = collections.Counter()

    def add(self, group: Group, found: InvalidGroup | None) -> list[str]:
        """Records the validation of a group; returns the actors that reach `MAX_REFUSED_IN_A_ROW`."""
        if found is None:
            for actor in group.actors:
                del self._in_a_row[actor]
            return []
        self._in_a_row.update(found.actors)
        return [a for a in sorted(found.actors) if self._in_a_row[a] >= MAX_REFUSED_IN_A_ROW]


def _rollout_objection(
    rollout: Rollout, num_prompt_tokens: int, ticket: Ticket, limits: GroupLimits, newest_step: int
) -> str | None:
    num_tokens = rollout.tokens.size  # an episode's budget includes observed tokens
    if num_tokens > ticket.sampling.max_tokens or num_prompt_tokens + num_tokens > limits.max_tokens:
        return "too_long"
    if _is_out_of_vocabulary(rollout.tokens, limits):
        return "out_of_vocabulary"
    if rollout.token_versions[-1] > newest_step:
        return "future_version"
    if np.any(rollout.behavior_logprobs[rollout.loss_mask] < MIN_LOGPROB):
        return "impossible_logprob"
    if limits.routing is not None and not limits.routing.fits(rollout.routed_experts):
        return "impossible_routing"
    is_taught = ticket.kind == "train" and ticket.task.teacher in limits.server_teachers
    if is_taught and rollout.teacher_logprobs is UNSET:
        return "missing_teacher"
    if abs(rollout.reward) > MAX_ABS_REWARD or np.any(np.abs(rollout.turn_rewards) > MAX_ABS_REWARD):
        return "extreme_reward"
    return None


def _is_out_of_vocabulary(tokens: np.ndarray, limits: GroupLimits) -> bool:
    return bool(tokens.min() < 0 or tokens.max() >= limits.vocab_size)
