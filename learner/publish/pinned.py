"""Evaluations and probes: groups sampled by the weights now published.

A probe must be back before the next optimizer step (the learner's weights would change under it). By rounds an
evaluation must be back before the next publish (the engine's would); where weights go out in flight, publishes don't
wait for it: it ends on newer weights, and says by which. Until then training goes on.
"""

import dataclasses
from collections.abc import Callable, Collection

import numpy as np
from absl import logging

from bridge.store.protocol import LearnerStore
from bridge.types import Group, RewardPart, Sampling, Ticket, Version
from learner.data.problems import Problem
from learner.objective.scores import is_episode, mean_scores
from learner.objective.trained import num_sampled

PROBE_PROBLEMS = 2
PROBE_SAMPLES = 2
PROBE_TOKENS = 64
LOOK_S = 0.2
"""How often it is looked for groups though the store told of none: the process may have been asked to stop."""
_FIRST_ORDER = {"probe": -2_000_000_000, "eval": -1_000_000_000}
"""Below every training ticket's, so that they are served first."""

Accept = Callable[[Group, Ticket], bool]
"""Whether a group that came for a ticket may be taken."""


def _accept_all(group: Group, ticket: Ticket) -> bool:
    del group, ticket
    return True


class Pinned:
    """Tickets of one kind, out for one version at a time."""

    def __init__(
        self,
        kind: str,
        store: LearnerStore,
        *,
        while_waiting: Callable[[], None],
        is_exact: bool = True,
        fenced_actors: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Nothing is out.

        Args:
          kind: eval or probe.
          store: where tickets go and groups come from.
          while_waiting: called on every look that found nothing; may raise.
          is_exact: all tokens must be by the very version asked about; otherwise newer ones of its incarnation do.
          fenced_actors: names of those whose groups are refused, also ones taken before the fence.
        """
        self._kind = kind
        self.is_exact = is_exact
        self._store = store
        self._while_waiting = while_waiting
        self._fenced_actors = fenced_actors
        self._tickets: dict[str, Ticket] = {}
        self._groups: dict[str, Group] = {}
        self._after_seq = 0
        self.version: Version | None = None
        """The weights asked about; None when nothing is out."""

    def start(self, problems: list[tuple[Problem, int]], sampling: Sampling, *, version: Version, round: int) -> None:
        """Sends (problem, samples) pairs out.

        Raises:
          RuntimeError: the ones before were not settled.
        """
        if self.version is not None:
            raise RuntimeError(f"{self._kind} tickets of {self.version} are still out")
        tickets = pinned_tickets(self._kind, problems, sampling, version=version, round=round)
        self._store.put_tickets(tickets)
        self._tickets = {t.id: t for t in tickets}
        self._groups = {}
        self.version = version

    def settle(self, accept: Accept = _accept_all) -> list[Group]:
        """Waits until all are back and returns them in order; what `accept` refuses is asked for again.

        A ticket that nobody could make a group for is left out.
        """
        while True:
            mark = self._store.mark()
            if self.poll(accept):
                break
            self._while_waiting()
            self._store.wait(mark, ("groups", "tickets"), timeout_s=LOOK_S)
        groups = sorted(self._groups.values(), key=lambda g: g.order)
        self._store.acknowledge([g.ticket_id for g in groups])
        self._tickets, self._groups, self.version = {}, {}, None
        return groups

    def poll(self, accept: Accept = _accept_all) -> bool:
        """Takes in what is there, without waiting; whether all are back. `settle` says what `accept` is for."""
        self._groups = {i: g for i, g in self._groups.items() if self._is_trusted(g)}  # the store offers the rest again
        while stored := self._store.read_groups(after_seq=self._after_seq, limit=256, kind=self._kind):
            for s in stored:
                self._after_seq = s.seq
                if s.group.ticket_id not in self._tickets or s.group.ticket_id in self._groups:
                    continue
                ticket = self._tickets[s.group.ticket_id]
                if self._is_of_the_version(s.group) and self._is_trusted(s.group) and accept(s.group, ticket):
                    self._groups[s.group.ticket_id] = s.group
                else:
                    self._store.reissue([s.group.ticket_id])
        if len(self._groups) < len(self._tickets):
            failed = self._store.failed()
            self._tickets = {i: t for i, t in self._tickets.items() if i not in failed}
        return len(self._groups) >= len(self._tickets)

    def _is_trusted(self, group: Group) -> bool:
        return group.actors.isdisjoint(self._fenced_actors())

    def _is_of_the_version(self, group: Group) -> bool:
        version = self.version
        if version is None:
            return False
        fits = group.incarnation == version.incarnation and group.min_step >= version.step
        if self.is_exact:
            fits = fits and group.max_step == version.step
        if not fits:
            logging.warning(
                "pinned group of other weights ticket=%s steps=%d..%d wanted=%s",
                group.ticket_id,
                group.min_step,
                group.max_step,
                version,
            )
        return fits


def evaluation_metrics(groups: list[Group], *, num_problems: int) -> dict[str, float]:
    """The held-out reward of evaluation groups, and the range of weights they are by (one version's by rounds).

    `num_problems` were asked, of which some may be left out: their number says whether two rewards are of one set.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    turns = [r.turn_rewards.size for r in rollouts if is_episode(r)]
    scores = mean_scores(score for r in rollouts for score in r.scores)
    return {
        "eval/reward": float(np.mean([r.reward for r in rollouts])),
        "eval/left_out": num_problems - len(groups),
        "eval/version": min(g.min_step for g in groups),
        "eval/last_version": max(g.max_step for g in groups),
        "eval/response_tokens": float(np.mean([num_sampled(r) for r in rollouts])),
        "eval/truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        **({"eval/turns": float(np.mean(turns))} if turns else {}),
        **{f"eval/rewards/{name}": score for name, score in scores.items()},
    }


def probe_problems(held_out: list[Problem]) -> list[tuple[Problem, int]]:
    """The (problem, samples) pairs of a probe: of an environment's problem the prompt alone, without its episode.

    A probe compares logprobs. The few tokens it may have are not enough for an episode, whose first observation alone
    may be longer; then none would come back.
    """
    return [(_single_turn(p), PROBE_SAMPLES) for p in held_out[:PROBE_PROBLEMS]]


def _single_turn(problem: Problem) -> Problem:
    task = problem.task
    if not task.environment:
        return problem
    rewards = task.rewards or (RewardPart("exact"),)  # a task has a judge; what it says of a probe is not read
    return dataclasses.replace(problem, task=dataclasses.replace(task, environment="", rewards=rewards))


def order_of(kind: str, index: int) -> int:
    """The order of the ticket of problem number `index`, from 0, of an evaluation or a probe."""
    return _FIRST_ORDER[kind] + index


def pinned_tickets(
    kind: str,
    problems: list[tuple[Problem, int]],
    sampling: Sampling,
    *,
    version: Version,
    round: int,
) -> list[Ticket]:
    """Tickets to be sampled by the weights now published: evaluations and probes.

    `problems` are (problem, samples) pairs. Their orders are negative, so they are served first.
    """
    if kind not in ("eval", "probe"):
        raise ValueError(f"kind must be eval or probe, got {kind!r}")
    return [
        Ticket(
            id=f"{kind}-{version}-{i:06d}",
            kind=kind,
            round=round,
            order=order_of(kind, i),
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            num_samples=num_samples,
            num_requests=num_samples,
            sampling=sampling,
            min_version=version,
        )
        for i, (problem, num_samples) in enumerate(problems)
    ]
