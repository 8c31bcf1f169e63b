"""The books of a run's tickets: which are issued, open, arrived, consumed. Pure: no jax, no clock.

Tickets are the only credit in the system: what is not issued is not generated, so nothing downstream can overflow.
Which tickets are due is the policy's matter: by rounds (`planner.RoundPlanner`) or by a window
(`async_window.WindowPlanner`).
"""

import abc
import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from bridge.rollout_types import Sampling, Ticket, Version
from configs.schema import Config
from configs.sections import RoundsConfig
from learner.data.problem import Problem


def num_sequences(deadline: int, coming: Mapping[int, int], *, update: int, left: int, per_update: int) -> int:
    """Returns how many groups with this deadline the update being filled can take before all earlier ones arrive.

    min over update <= d < deadline of left + (d - update) U - (groups due by d that have not arrived); `left` for a
    group that is due itself. Below 1 the group has to wait.

    Args:
      deadline: the last update that can train the group.
      coming: how many groups have not arrived, by deadline; a past deadline counts as due.
      update: number of the update being filled, which is the learner's step.
      left: groups that it still lacks.
      per_update: U.
    """
    places, total = left, left
    for last in range(update, deadline):
        due = sum(number for at, number in coming.items() if at <= last)
        places = min(places, total - due)
        total += per_update
    return places


MAX_REPLACED_PER_GROUP = 10
"""Prompts that a filter may throw away in a round, for each of its groups; then it lets groups pass."""


@dataclasses.dataclass(frozen=True)
class Consumed:
    """What consuming one group completed."""

    ends_update: bool
    ends_round: bool


class TicketLedger(abc.ABC):
    """Issues tickets and keeps the books of a run's groups.

    Every order is issued once, in sequence. A group that is dropped is issued again under the same id and stays
    open; a prompt that lost its round's race is deferred and comes back under a new order. So
    consumed + open + deferred = issued at any time.
    """

    def __init__(
        self, rounds: RoundsConfig, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts before the first round; `incarnation` is the learner's."""
        self._rounds = rounds
        self._sampling = sampling
        self._next_problem = next_problem
        self._incarnation = incarnation
        self._open: dict[str, Ticket] = {}
        self._arrived: set[str] = set()
        self._update: list[Ticket] = []
        self._sources: dict[str, str] = {}
        """The source of each ticket's problem, where it has a name; of tickets that are or may be open again."""
        self._num_issued = 0
        self._num_consumed = 0
        self._num_deferred = 0
        self._num_replaced_in_round = 0
        self.round_is_long = False
        """Whether the round now open, or the heat last issued from, is one of the long-prompt queue's."""
        self.served_step = 0
        """Step of the oldest weights that any engine serves, as far as the learner knows; the caller keeps it current.
        """
        self.num_blocked: collections.Counter[str] = collections.Counter()
        """How often a bound began to keep a window's backlog from being filled: `queue` (complete groups) or `lag`."""

    @abc.abstractmethod
    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """The tickets due now that the learner has nothing else to do, at its `step`.

        `num_unclaimed` gives how many groups' tickets no actor has claimed; it is called where that matters.
        """

    def top_up(self, *, step: int, num_unclaimed: Callable[[], int]) -> list[Ticket]:
        """The tickets due while the learner waits or computes: none by rounds, whose weights may not be out yet."""
        del step, num_unclaimed
        return []

    @abc.abstractmethod
    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists: a restarted learner meeting a group that it had asked for."""

    @property
    def open_tickets(self) -> list[Ticket]:
        """Issued and not consumed, in order."""
        return sorted(self._open.values(), key=lambda t: t.order)

    @property
    def awaited_tickets(self) -> list[Ticket]:
        """Open tickets whose groups have not arrived, in order."""
        return [t for t in self.open_tickets if t.id not in self._arrived]

    def has_arrived(self, ticket_id: str) -> bool:
        """Returns True if the complete group of an open ticket is here."""
        return ticket_id in self._arrived

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long round, the oldest first; as tickets of the rounds they lost."""
        return []

    @property
    def num_issued(self) -> int:
        """Tickets so far; the order that is issued next."""
        return self._num_issued

    @property
    def num_left_in_update(self) -> int:
        """Groups that the update now being filled still wants."""
        per_update = self._rounds.groups_per_update
        return per_update - self._num_consumed % per_update

    @property
    def num_left_in_round(self) -> int:
        """Groups that the round now being consumed still wants."""
        return self._rounds.groups_per_round - self._num_consumed % self._rounds.groups_per_round

    @property
    def round(self) -> int:
        """The round now being consumed, from 0."""
        return self._num_consumed // self._rounds.groups_per_round

    @property
    def may_replace(self) -> bool:
        """Whether the round has had few enough prompts replaced; a bound on what a filter can throw away."""
        return self._num_replaced_in_round < MAX_REPLACED_PER_GROUP * self._rounds.groups_per_round

    def num_sequences(self, min_step: int, *, step: int, max_lag_steps: int) -> int:
        """Returns how many groups with an oldest token of `min_step` the update being filled can take now.

        Fewer than it lacks, where older groups that have not arrived need the places by their deadlines
        (`num_sequences`). `step` is the learner's.
        """
        deadline, left = min_step + max_lag_steps, self.num_left_in_update
        if deadline <= step:
            return left
        coming = collections.Counter(ticket.min_version.step + max_lag_steps for ticket in self._coming())
        per_update = self._rounds.groups_per_update
        return num_sequences(deadline, coming, update=step, left=left, per_update=per_update)

    def is_open(self, ticket_id: str) -> bool:
        """Whether this ticket's group is still wanted."""
        return ticket_id in self._open

    def ticket(self, ticket_id: str) -> Ticket:
        """An open ticket.

        Raises:
          KeyError: it is not open.
        """
        return self._open[ticket_id]

    def source(self, ticket_id: str) -> str:
        """Name of the source that the ticket's problem is of (`learner.data.problem.Problem.source`)."""
        return self._sources.get(ticket_id, "")

    def replace(self, ticket_id: str, *, is_filtered: bool = False) -> Ticket:
        """Another problem under an open ticket's id, for one that no group can be made for.

        With `is_filtered` for one that teaches nothing: those are counted (`may_replace`).
        """
        problem = self._next_problem()
        ticket = dataclasses.replace(
            self._open[ticket_id],
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            min_version=self._renewed_version(self._open[ticket_id]),
        )
        self._open[ticket_id] = ticket
        self._set_source(ticket_id, problem.source)
        self._arrived.discard(ticket_id)
        self._num_replaced_in_round += is_filtered
        return ticket

    def renew_one(self, ticket_id: str) -> Ticket:
        """Asks for an open ticket's group again, from later weights where those decide; returns it as it is now."""
        ticket = self._open[ticket_id]
        self._open[ticket_id] = ticket = dataclasses.replace(ticket, min_version=self._renewed_version(ticket))
        return ticket

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Books an open ticket's complete group as here; returns the tickets that nobody waits for any more.

        Raises:
          KeyError: the ticket is not open.
        """
        if ticket_id not in self._open:
            raise KeyError(ticket_id)
        self._arrived.add(ticket_id)
        return []

    def forget_arrival(self, ticket_id: str) -> None:
        """Books a group that had arrived as gone again; it is still wanted."""
        self._arrived.discard(ticket_id)

    def consume(self, ticket_id: str) -> Consumed:
        """Books a group as trained.

        Raises:
          KeyError: the ticket is not open; its group must not be trained.
        """
        if self.num_left_in_update == self._rounds.groups_per_update:
            for ticket in self._update:  # nothing puts them back any more
                self._sources.pop(ticket.id, None)
            self._update = []
        self._update.append(self._open.pop(ticket_id))
        self._arrived.discard(ticket_id)
        self._num_consumed += 1
        ends_round = self._num_consumed % self._rounds.groups_per_round == 0
        if ends_round:
            self._num_replaced_in_round = 0
        return Consumed(ends_update=self._num_consumed % self._rounds.groups_per_update == 0, ends_round=ends_round)

    def reopen_update(self) -> list[Ticket]:
        """Opens the tickets of the update last consumed again: its groups were not trained after all."""
        tickets, self._update = self._update, []
        self._open |= {t.id: t for t in tickets}
        self._num_consumed -= len(tickets)
        return tickets

    def reissue_open(self, *, step: int, keep: Collection[str] = ()) -> list[Ticket]:
        """Asks for open tickets anew, from this learner's weights of `step` on; but for those in `keep`.

        Returns them as they are now.
        """
        version = Version(incarnation=self._incarnation, step=step)
        renewed = [dataclasses.replace(t, min_version=version) for t in self.open_tickets if t.id not in keep]
        self._open |= {t.id: t for t in renewed}
        return renewed

    def get_state(self) -> dict[str, Any]:
        """Everything but the tickets' contents (`open_tickets`, `long_queue`); JSON."""
        return {
            "num_issued": self._num_issued,
            "num_consumed": self._num_consumed,
            "num_deferred": self._num_deferred,
            "round_is_long": self.round_is_long,
            "num_replaced_in_round": self._num_replaced_in_round,
            "sources": {i: self._sources[i] for i in sorted(self._kept_ids() & self._sources.keys())},
        }

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: the books don't add up.
        """
        del long_queue  # the policies' matter
        if state["num_consumed"] + state["num_deferred"] + len(open_tickets) != state["num_issued"]:
            raise ValueError(
                f"{state['num_issued']} tickets issued, {state['num_consumed']} consumed, "
                f"{state['num_deferred']} deferred, {len(open_tickets)} open: the checkpoint's books don't add up"
            )
        self._num_issued = state["num_issued"]
        self._num_consumed = state["num_consumed"]
        self._num_deferred = state["num_deferred"]
        self.round_is_long = state["round_is_long"]
        self._num_replaced_in_round = state["num_replaced_in_round"]
        self._sources = dict(state["sources"])
        self._open = {t.id: t for t in open_tickets}
        self._arrived, self._update = set(), []

    def _renewed_version(self, ticket: Ticket) -> Version:
        """Returns the oldest weights for a group that is to be generated again under a ticket's id."""
        return ticket.min_version

    def _coming(self) -> Iterable[Ticket]:
        """Returns open tickets whose groups are still to arrive and be trained."""
        return (t for t in self._open.values() if t.id not in self._arrived)

    def _kept_ids(self) -> set[str]:
        """Tickets whose prompts are asked for now or later."""
        return self._open.keys() | {t.id for t in self.long_queue}

    def _set_source(self, ticket_id: str, source: str) -> None:
        self._sources.pop(ticket_id, None)
        if source:
            self._sources[ticket_id] = source

    def _make_ticket(self, prompt: Problem | Ticket, *, round: int, num_requests: int, min_version: Version) -> Ticket:
        """The next order's ticket, open from now on."""
        ticket = Ticket(
            id=f"{self._num_issued:09d}",
            kind="train",
            round=round,
            order=self._num_issued,
            prompt_tokens=prompt.prompt_tokens,
            task=prompt.task,
            num_samples=self._rounds.samples_per_group,
            num_requests=num_requests,
            sampling=self._sampling,
            min_version=min_version,
        )
        self._num_issued += 1
        self._open[ticket.id] = ticket
        # A prompt that lost a race comes back as another ticket.
        source = self._sources.pop(prompt.id, "") if isinstance(prompt, Ticket) else prompt.source
        self._set_source(ticket.id, source)
        return ticket


def training_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How training responses are sampled."""
    return Sampling(
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=stop_token_ids,
    )
