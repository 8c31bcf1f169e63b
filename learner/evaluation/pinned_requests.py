"""Version-pinned requests: evaluation and probe groups sampled from the published weights.

A probe must complete before the next optimizer step, which changes the learner's weights. An evaluation may run past
the next publish and then finish on newer weights, which its row records, unless the publish waits for it
(`evaluation.at_publish`). Training continues meanwhile.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection
from typing import Literal

from absl import logging

from bridge.rollout_types import Group, RewardPart, Sampling, Ticket, Version
from bridge.store.sql.learner_side import LearnerStore
from learner.data.problem import Problem

PROBE_PROBLEMS = 2
PROBE_SAMPLES = 2
PROBE_TOKENS = 64
LOOK_S = 0.2
"""Maximum seconds between polls without a store notification, so that a stop request is noticed."""
_MANY = 4096
"""Groups of a kind that are looked through at once."""
_FIRST_ORDER = {"probe": -2_000_000_000, "eval": -1_000_000_000}
"""Orders below all training tickets, so that these tickets are served first."""

MAX_SET_PROBLEMS = 10_000_000
"""Maximum problems per set, which keeps ticket orders of sets and of training disjoint."""

Kind = Literal["eval", "probe"]
Accept = Callable[[Group, Ticket], bool]
"""Returns True if a group that arrived for a ticket is valid."""


def _accept_all(group: Group, ticket: Ticket) -> bool:
    del group, ticket
    return True


class PinnedRequests:
    """Tickets of one kind, in progress for one version at a time."""

    def __init__(
        self,
        kind: Kind,
        store: LearnerStore,
        *,
        on_wait: Callable[[], None],
        is_exact: bool = True,
        fenced_actors: Callable[[], Collection[str]] = frozenset,
        name: str = "",
        place: int = 0,
    ) -> None:
        """Creates the requests; none is in progress.

        Args:
          kind: kind of the tickets.
          store: store of the tickets and their groups.
          on_wait: called on every poll that found nothing; may raise.
          is_exact: True if all tokens must be from the requested version; else newer steps of its incarnation are
            accepted.
          fenced_actors: returns names of actors whose groups are rejected, including groups read before the fence.
          name: name of the set, as part of ticket ids; empty for a single set.
          place: position of the set; lower positions are served first.
        """
        self._kind: Kind = kind
        self._name, self._place = name, place
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
        """Version of the requested weights; None if no request is in progress."""

    def start(
        self,
        problems: list[tuple[Problem, int]],
        sampling: Sampling,
        *,
        version: Version,
        round: int,
        limit: int | None = None,
    ) -> None:
        """Sends (problem, samples) pairs, up to `limit` samples; raises RuntimeError if requests are in progress."""
        if self.version is not None:
            raise RuntimeError(f"{self._kind} tickets of {self.version} are still in progress")
        tickets = pinned_tickets(
            self._kind, problems, sampling, version=version, round=round, name=self._name, place=self._place
        )
        self._tickets = {t.id: t for t in tickets}
        self._unsent = collections.deque(tickets)
        self._groups = {}
        self.version = version
        self.send(limit)

    def send(self, limit: int | None = None) -> None:
        """Sends unsent tickets up to `limit` more samples; a larger ticket is sent if nothing else is pending."""
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
        """Samples that are sent and not returned."""
        return sum(ticket.num_samples for ticket in self._pending())

    def _pending(self) -> list[Ticket]:
        others = self._groups.keys() | {t.id for t in self._unsent}
        return [ticket for id_, ticket in self._tickets.items() if id_ not in others]

    @property
    def num_unsent(self) -> int:
        """Tickets that wait for `send`."""
        return len(self._unsent)

    def wait(self, accept: Accept = _accept_all) -> list[Group]:
        """Sends the remaining tickets, waits for all groups and returns them in order.

        Groups that `accept` rejects are requested again. Tickets that no actor can complete are left out.
        """
        self.send()
        self._until(lambda: self.poll(accept))
        groups = sorted(self._groups.values(), key=lambda g: g.order)
        self._store.acknowledge([g.ticket_id for g in groups])
        self._tickets, self._groups, self.version = {}, {}, None
        return groups

    def poll(self, accept: Accept = _accept_all) -> bool:
        """Collects available groups without blocking; returns True if all are complete. `wait` describes `accept`."""
        # Drop groups of newly fenced actors: the fence makes the store reissue their tickets.
        self._groups = {i: g for i, g in self._groups.items() if self._is_trusted(g)}
        self._put_after_break()
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
            failed = self._tickets.keys() & self._store.failed()
            self._store.withdraw(sorted(failed))  # kept, each poll of the run would read them again
            self._tickets = {i: t for i, t in self._tickets.items() if i not in failed}
        return len(self._groups) >= len(self._tickets)

    def await_groups(self) -> None:
        """Waits until the store has a valid group of each ticket that can be completed; collects none."""
        self._until(self._have_arrived)

    def _until(self, is_done: Callable[[], bool]) -> None:
        while True:
            mark = self._store.mark()
            self._put_after_break()
            if is_done():
                return
            self._while_waiting()
            self._store.wait(mark, ("groups", "tickets"), timeout_s=LOOK_S)

    def _have_arrived(self) -> bool:
        stored = self._store.read_groups(after_seq=self._after_seq, limit=_MANY, kind=self._kind)
        arrived = {
            s.group.ticket_id for s in stored if self._is_of_the_version(s.group) and self._is_trusted(s.group)
        } | {id_ for id_, group in self._groups.items() if self._is_trusted(group)}
        return self._tickets.keys() <= arrived or self._tickets.keys() <= arrived | self._store.failed().keys()

    def _put_after_break(self) -> None:
        if self._num_breaks != (num_breaks := self._store.num_breaks):
            self._num_breaks = num_breaks
            # The store may have lost the latest tickets. Sending a ticket that it still has does nothing.
            self._store.put_tickets(self._pending())

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
                "version-pinned group of other weights rejected ticket=%s steps=%d..%d expected=%s",
                group.ticket_id,
                group.min_step,
                group.max_step,
                version,
            )
        return fits


def probe_problems(held_out: list[Problem]) -> list[tuple[Problem, int]]:
    """Returns the (problem, samples) pairs of a probe; an environment's problem becomes its prompt alone.

    A probe compares logprobs of a few tokens. An episode's first observation may be longer than that, and the group
    would never complete.
    """
    return [(_single_turn(p), PROBE_SAMPLES) for p in held_out[:PROBE_PROBLEMS]]


def _single_turn(problem: Problem) -> Problem:
    task = problem.task
    if not task.environment:
        return problem
    rewards = task.rewards or (RewardPart("exact"),)  # a task needs a verifier; a probe ignores its score
    return dataclasses.replace(problem, task=dataclasses.replace(task, environment="", rewards=rewards))


def problem_number(ticket_id: str) -> int:
    """Returns the index of a version-pinned ticket's problem in its set."""
    return int(ticket_id.rpartition("-")[2])


def pinned_tickets(
    kind: Kind,
    problems: list[tuple[Problem, int]],
    sampling: Sampling,
    *,
    version: Version,
    round: int,
    name: str = "",
    place: int = 0,
) -> list[Ticket]:
    """Returns evaluation or probe tickets for the published weights.

    `problems` are (problem, samples) pairs. Orders are negative, so these tickets are served first. `name` and `place`
    are those of the set if there are several.
    """
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
