"""Puts a ticket's K samples and rewards together; a group exists only when it is complete. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from actor.engine.protocol import Episode, Sample
from actor.rewards.scheduler import Judgement
from bridge.types import Group, Rollout, Ticket, Version, newest_of_each


class GroupBuilder:
    """One attempt at one ticket."""

    def __init__(self, ticket: Ticket, *, actor: str, started_s: float) -> None:
        """Starts empty; `started_s` is the Unix time at which the first request entered the engine."""
        self._ticket = ticket
        self._actor = actor
        self._started_s = started_s
        self._members: dict[int, tuple[Sample, Judgement]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether K samples have their rewards."""
        return len(self._members) == self._ticket.num_samples

    def add(self, index: int, sample: Sample, judged: Judgement) -> None:
        """Books the sample of request `index`.

        Raises:
          ValueError: no such index, twice the same, or a reward that is no number.
        """
        if not 0 <= index < self._ticket.num_requests or index in self._members or self.is_complete:
            raise ValueError(f"ticket {self._ticket.id}: sample {index} is out of range, here already or one too many")
        if not math.isfinite(judged.reward):
            raise ValueError(f"ticket {self._ticket.id}: sample {index} has reward {judged.reward}")
        self._members[index] = (sample, judged)

    def build(self, *, finished_s: float) -> Group:
        """The complete group, its rollouts in order of request.

        Raises:
          ValueError: it is not complete.
        """
        if not self.is_complete:
            raise ValueError(f"ticket {self._ticket.id} has {len(self._members)} of {self._ticket.num_samples} samples")
        members = [self._members[i] for i in sorted(self._members)]
        *older, newest = newest_of_each(v for sample, _ in members for v in _ends_of_incarnations(sample))
        return Group(
            ticket_id=self._ticket.id,
            kind=self._ticket.kind,
            round=self._ticket.round,
            order=self._ticket.order,
            prompt_tokens=self._ticket.prompt_tokens,
            rollouts=tuple(_rollout(sample, judged) for sample, judged in members),
            incarnation=newest.incarnation,
            older_versions=tuple(older),
            actor=self._actor,
            started_s=self._started_s,
            finished_s=finished_s,
        )


def _ends_of_incarnations(sample: Sample) -> Sequence[Version]:
    """Returns versions of a sample, among them the last of each incarnation; they never go back within a sample."""
    versions = sample.token_versions
    is_mixed = versions[0].incarnation != versions[-1].incarnation
    return versions if is_mixed else versions[-1:]


def _rollout(sample: Sample, judged: Judgement) -> Rollout:
    episode = sample.episode or Episode(
        sampled=np.ones(sample.tokens.size, np.bool_), turn_rewards=np.zeros(0, np.float32)
    )
    return Rollout(
        tokens=sample.tokens,
        loss_mask=episode.sampled,
        behavior_logprobs=sample.logprobs,
        token_versions=np.asarray([v.step for v in sample.token_versions], np.int32),
        finish=sample.finish,
        reward=judged.reward + float(episode.turn_rewards.sum(dtype=np.float64)),
        scores=judged.scores,
        turn_rewards=episode.turn_rewards,
    )
