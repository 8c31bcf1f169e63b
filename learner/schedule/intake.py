"""What a group's arrival brings about: a prompt without signal is replaced, a race is decided."""

import numpy as np
from absl import logging

from bridge.store.protocol import LearnerStore
from bridge.timeline import Timeline
from bridge.types import Group
from configs.schema import Config
from learner.objective.advantages import has_signal, shaped_rewards
from learner.schedule.planner import RoundPlanner


class Intake:
    """Books arriving groups with the planner, and tells the store what follows from it."""

    def __init__(self, config: Config, *, store: LearnerStore, planner: RoundPlanner, timeline: Timeline) -> None:
        """Puts the parts together."""
        self._config, self._store, self._planner, self._timeline = config, store, planner, timeline
        self._warned_in_round = -1

    def refuse(self, group: Group) -> str | None:
        """Keeps a group without signal out (`zero_variance`), another prompt taking its place; books any other.

        One that answers another prompt than its ticket has goes too (`other_prompt`): a restarted learner may give an
        order to another prompt than before, since which one a replacement took, or who lost a race, depended on the
        order of arrival.

        When the group decides its round's race, the losers' tickets are withdrawn: their actors abort them.
        """
        ticket = self._planner.ticket(group.ticket_id)
        if not np.array_equal(ticket.prompt_tokens, group.prompt_tokens):
            self._store.withdraw([ticket.id])
            self._store.put_tickets([ticket])
            return "other_prompt"
        if self._config.rounds.filter_zero_variance and not self._has_signal(group):
            if self._planner.may_replace:
                self._store.withdraw([group.ticket_id])
                self._store.put_tickets([self._planner.replace(group.ticket_id)])
                return "zero_variance"
            self._warn()
        losers = self._planner.arrive(group.ticket_id)
        if losers:
            self._store.withdraw([t.id for t in losers])
            self._timeline.instant("round closed", round=group.round, deferred=len(losers))
        return None

    def _has_signal(self, group: Group) -> bool:
        rewards = np.asarray([r.reward for r in group.rollouts], np.float64)
        lengths = np.asarray([r.tokens.size for r in group.rollouts])
        return has_signal(
            shaped_rewards(rewards, lengths, self._config.loss, self._config.sampling.max_response_tokens)
        )

    def _warn(self) -> None:
        if self._warned_in_round != self._planner.round:
            self._warned_in_round = self._planner.round
            logging.warning(
                "round %d: so many prompts had rewards that are all alike that the rest is let through; "
                "are the problems too easy or too hard, or does the verifier fail? (rounds.filter_zero_variance)",
                self._planner.round,
            )
