"""What can't be right in a group, whoever made it: looked for before the group may train. Pure.

The wire types refuse what contradicts itself; here is what contradicts the run: its model, its limits, the ticket, the
learner's own version. A group like that comes from a broken actor or verifier. None of it would crash the learner: an
embedding is looked up at another index, a ratio is 0, an advantage vanishes, and the run trains on.
"""

import collections
import dataclasses
import math

import numpy as np

from bridge.rollout_types import MAX_ABS_REWARD, Group, Rollout, Ticket, Version

MIN_LOGPROB = math.log(2.0**-149) - 0.5
"""Nats. A token is drawn by its probability in float32, whose smallest number is 2^-149; at ln of it, -103.3, a token
can't be drawn any more. The rest is room for rounding."""

MAX_REFUSED_IN_A_ROW = 8
"""Groups of one actor that are refused without a good one between them; then it is broken, and fenced."""

REASONS = {
    "wrong_size": "another number of responses than the ticket asks for",
    "out_of_vocabulary": "a token id outside the model's vocabulary",
    "too_long": "a response, observed tokens included, over its ticket's max_tokens, or over model.max_tokens with "
    "its prompt",
    "future_version": "weights newer than the learner's",
    "impossible_logprob": f"a behaviour logprob below {MIN_LOGPROB:.0f}, which no sampled token can have",
    "extreme_reward": f"a reward, of a response or a turn, beyond {MAX_ABS_REWARD:g}, too large for float32 advantages",
}
"""Why a group is refused, and what that means; each is counted as `groups/<reason>`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """What a run's groups must keep to."""

    vocab_size: int
    """Of the model: rows of its embedding."""
    max_tokens: int
    """Longest prompt and response together (`model.max_tokens`)."""


@dataclasses.dataclass(frozen=True)
class InvalidGroup:
    """Why a group can't be right, and whose doing it is."""

    reason: str
    """One of `REASONS`."""
    actors: frozenset[str]
    """Who made what is wrong."""


def objection(group: Group, ticket: Ticket, limits: GroupLimits, *, newest: Version) -> InvalidGroup | None:
    """What can't be right in a group; None if nothing is found.

    Args:
      group: answers the ticket, by its id and its prompt.
      ticket: as it is open now.
      limits: the run's.
      newest: the learner's own version. Weights of an abandoned incarnation may be later: ask about those before.
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
    return InvalidGroup(found[0][0], frozenset(maker for _, maker in found)) if found else None


class RejectionCounter:
    """How many groups of each actor were refused since its last good one."""

    def __init__(self) -> None:
        """None yet."""
        self._in_a_row: collections.Counter[str] = collections.Counter()

    def add(self, group: Group, found: InvalidGroup | None) -> list[str]:
        """Books what was found in a group; returns the actors that are broken by now (`MAX_REFUSED_IN_A_ROW`)."""
        if found is None:
            for actor in group.actors:
                del self._in_a_row[actor]
            return []
        self._in_a_row.update(found.actors)
        return [a for a in sorted(found.actors) if self._in_a_row[a] >= MAX_REFUSED_IN_A_ROW]


def _rollout_objection(
    rollout: Rollout, num_prompt_tokens: int, ticket: Ticket, limits: GroupLimits, newest_step: int
) -> str | None:
    num_tokens = rollout.tokens.size  # an episode's budget is for what it observes, too
    if num_tokens > ticket.sampling.max_tokens or num_prompt_tokens + num_tokens > limits.max_tokens:
        return "too_long"
    if _is_out_of_vocabulary(rollout.tokens, limits):
        return "out_of_vocabulary"
    if rollout.token_versions[-1] > newest_step:
        return "future_version"
    if np.any(rollout.behavior_logprobs[rollout.loss_mask] < MIN_LOGPROB):
        return "impossible_logprob"
    if abs(rollout.reward) > MAX_ABS_REWARD or np.any(np.abs(rollout.turn_rewards) > MAX_ABS_REWARD):
        return "extreme_reward"
    return None


def _is_out_of_vocabulary(tokens: np.ndarray, limits: GroupLimits) -> bool:
    return bool(tokens.min() < 0 or tokens.max() >= limits.vocab_size)
