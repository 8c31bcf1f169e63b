"""Evaluations and probes: groups sampled by the weights now published.

A probe must be back before the next optimizer step (the learner's weights would change under it). An evaluation that is
not back at the next publish ends on newer weights, and says by which; or the publish waits for it
(`evaluation.at_publish`). Until then training goes on.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection

from absl import logging

from bridge.rollout_types import Group, RewardPart, Sampling, Ticket, Version
from bridge.store.sql.learner_side import LearnerStore
from learner.data.problem import Problem

PROBE_PROBLEMS = 2
PROBE_SAMPLES = 2
PROBE_TOKENS = 64
LOOK_S = 0.2
"""How often it is looked for groups though the store told of none: the process may have been asked to stop."""
_FIRST_ORDER = {"probe": -2_000_000_000, "eval": -1_000_000_000}
"""Below every training ticket's, so that they are served first."""

MAX_SET_PROBLEMS = 10_000_000
"""Of one set: its tickets' orders are apart from the next one's, and from training's."""

Accept = Callable[[Group, Ticket], bool]
"""Whether a group that came for a ticket may be taken."""


def _accept_all(group: Group, ticket: Ticket) -> bool:
    del group, ticket
    return True


class PinnedRequests:
    """Tickets of one kind, out for one version at a time."""

    def __init__(
        self,
        kind: str,
        store: LearnerStore,
        *,
        on_wait: Callable[[], None],
        is_exact: bool = True,
        fenced_actors: Callable[[], Collection[str]] = frozenset,
        name: str = "",
        place: int = 0,
    ) -> None:
        """Nothing is out.

        Args:
          kind: eval or probe.
          store: where tickets go and groups come from.
          on_wait: called on every look that found nothing; may raise.
          is_exact: all tokens must be by the very version asked about; otherwise newer ones of its incarnation do.
          fenced_actors: names of those whose groups are refused, also ones taken before the fence.
          name: of the set, where there are several of a kind: part of its tickets' ids.
          place: of the set among them: those of a lower one are served first.
        """
        self._kind, self._name, self._place = kind, name, place
        self.is_exact = is_exact
        self._store = store
        self._while_waiting = on_wait
        self._fenced_actors = fenced_actors
        self._tickets: dict[str, Ticket] = {}
        self._groups: dict[str, Group] = {}
        self._unsent: collections.deque[Ticket] = collections.deque()
        self._after_seq = 0
        self._num_breaks = store.num_breaks
        self.version: Version | None = None
        """The weights asked about; None when nothing is out."""

    def start(
        self,
        problems: list[tuple[Problem, int]],
        sampling: Sampling,
        *,
        version: Version,
        round: int,
        limit: int | None = None,
    ) -> None:
        """Sends (problem, samples) pairs out; of more than `limit` samples the rest waits for `send`.

        Raises:
          RuntimeError: the ones before were not settled.
        """
        if self.version is not None:
            raise RuntimeError(f"{self._kind} tickets of {self.version} are still out")
        tickets = pinned_tickets(
            self._kind, problems, sampling, version=version, round=round, name=self._name, place=self._place
        )
        self._tickets = {t.id: t for t in tickets}
        self._unsent = collections.deque(tickets)
        self._groups = {}
        self.version = version
        self.send(limit)

    def send(self, limit: int | None = None) -> None:
        """Sends out what waits, up to so many samples more; a ticket whose samples are more goes out alone."""
        sent: list[Ticket] = []
        num_samples = 0
        while self._unsent and (limit is None or num_samples + self._unsent[0].num_samples <= limit):
            sent.append(self._unsent.popleft())
            num_samples += sent[-1].num_samples
        if not sent and self._unsent and limit and not self.num_pending:
            sent.append(self._unsent.popleft())
        if sent:
            self._store.put_tickets(sent)

    @property
    def num_pending(self) -> int:
        """Samples that were sent for and are not back."""
        unsent = {t.id for t in self._unsent}
        return sum(t.num_samples for i, t in self._tickets.items() if i not in self._groups and i not in unsent)

    @property
    def num_unsent(self) -> int:
        """Tickets that wait for `send`."""
        return len(self._unsent)

    def wait(self, accept: Accept = _accept_all) -> list[Group]:
        """Waits until all are back and returns them in order; what `accept` refuses is asked for again.

        What was not sent yet is. A ticket that nobody could make a group for is left out.
        """
        self.send()
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
        if self._num_breaks != (num_breaks := self._store.num_breaks):
            self._num_breaks = num_breaks
            unsent = {t.id for t in self._unsent}
            # The store may have lost the last ones; those that it knows are left alone.
            self._store.put_tickets([t for i, t in self._tickets.items() if i not in self._groups and i not in unsent])
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


def problem_number(ticket_id: str) -> int:
    """Which of its problems, in their order, a pinned ticket is of."""
    return int(ticket_id.rpartition("-")[2])


def pinned_tickets(
    kind: str,
    problems: list[tuple[Problem, int]],
    sampling: Sampling,
    *,
    version: Version,
    round: int,
    name: str = "",
    place: int = 0,
) -> list[Ticket]:
    """Tickets to be sampled by the weights now published: evaluations and probes.

    `problems` are (problem, samples) pairs. Their orders are negative, so they are served first; `name` and `place` are
    those of their set, where there are several.
    """
    if kind not in ("eval", "probe"):
        raise ValueError(f"kind must be eval or probe, got {kind!r}")
    return [
        Ticket(
            id=f"{kind}-{f'{name}-' if name else ''}{version}-{i:06d}",
            kind=kind,
            round=round,
            order=_FIRST_ORDER[kind] + place * MAX_SET_PROBLEMS + i,
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            num_samples=num_samples,
            num_requests=num_samples,
            sampling=sampling,
            min_version=version,
        )
        for i, (problem, num_samples) in enumerate(problems)
    ]
