"""Ticket tracker: which tickets are issued, open, arrived and consumed. Pure: no JAX, no clock.

Tickets are the only credit in the system: actors generate only what is issued, so nothing downstream can overflow. A
planner decides which tickets are due, by rounds (`round_planner.py`) or by a window (`window_planner.py`).
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
"""Prompts per group of a round that the zero-variance filter may replace; it then lets further groups pass."""


@dataclasses.dataclass(frozen=True)
class Consumed:
    """Units that the consumption of a group completed."""

    ends_update: bool
    ends_round: bool


class TicketLedger(abc.ABC):
    """Tracker of a run's tickets and groups.

    Each order is issued once, in sequence. A dropped group is issued again under the same id and stays open. A prompt
    that lost its round's race is deferred and returns under a new order. Therefore consumed + open + deferred = issued.
    """

    def __init__(
        self, rounds: RoundsConfig, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        self._rounds = rounds
        self._sampling = sampling
        self._next_problem = next_problem
        self._incarnation = incarnation
        self._open: dict[str, Ticket] = {}
        self._arrived: set[str] = set()
        self._update: list[Ticket] = []
        self._sources: dict[str, str] = {}
        """Source name of each ticket's problem, for tickets that are open or may be reopened."""
        self._num_issued = 0
        self._num_consumed = 0
        self._num_deferred = 0
        self._num_replaced_in_round = 0
        self.round_is_long = False
        """True if the round in progress, or the race last issued from, uses prompts of the long-prompt queue."""
        self.served_step = 0
        """Step of the oldest weights that any engine serves, as far as known; the caller updates it."""
        self.num_blocked: collections.Counter[str] = collections.Counter()
        """Number of times that a bound began to block a window's backlog: `queue` (complete groups) or `lag`."""

    @abc.abstractmethod
    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """Returns the tickets due when the learner waits for groups, at its `step`.

        `num_unclaimed` returns the number of groups whose tickets no actor has claimed; it is called only if needed.
        """

    def top_up(self, *, step: int, num_unclaimed: Callable[[], int]) -> list[Ticket]:
        """Returns new tickets to issue while the learner waits or computes, like `issue`; none in round mode."""
        del step, num_unclaimed
        return []

    @abc.abstractmethod
    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues tickets until `order` exists: a restarted learner receives a group that it had issued before."""

    @property
    def open_tickets(self) -> list[Ticket]:
        """Issued tickets that are not consumed, in order."""
        return sorted(self._open.values(), key=lambda t: t.order)

    @property
    def awaited_tickets(self) -> list[Ticket]:
        """Open tickets whose groups have not arrived, in order."""
        return [t for t in self.open_tickets if t.id not in self._arrived]

    def has_arrived(self, ticket_id: str) -> bool:
        """Returns True if the complete group of an open ticket has arrived."""
        return ticket_id in self._arrived

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long round, oldest first, as tickets of the rounds they lost."""
        return []

    @property
    def num_issued(self) -> int:
        """Cumulative number of issued tickets, which is the next order."""
        return self._num_issued

    @property
    def num_left_in_update(self) -> int:
        """Groups that the update in progress still needs."""
        per_update = self._rounds.groups_per_update
        return per_update - self._num_consumed % per_update

    @property
    def num_left_in_round(self) -> int:
        """Groups that the round in progress still needs."""
        return self._rounds.groups_per_round - self._num_consumed % self._rounds.groups_per_round

    @property
    def num_arrived_in_round(self) -> int:
        """Groups of the round in progress that have arrived, trained or not."""
        return self._rounds.groups_per_round - self.num_left_in_round + len(self._arrived)

    @property
    def round(self) -> int:
        """Round in progress, from 0."""
        return self._num_consumed // self._rounds.groups_per_round

    @property
    def may_replace(self) -> bool:
        """True if the round's filter may replace a further prompt (`MAX_REPLACED_PER_GROUP`)."""
        return self._num_replaced_in_round < MAX_REPLACED_PER_GROUP * self._rounds.groups_per_round

    def num_sequences(self, min_step: int, *, step: int, max_lag_steps: int) -> int:
        """Returns how many groups with an oldest token of `min_step` the update being filled can take now.

        That is fewer than it lacks if older groups that have not arrived need places by their deadlines
        (`num_sequences`). `step` is the learner's.
        """
        deadline, left = min_step + max_lag_steps, self.num_left_in_update
        if deadline <= step:
            return left
        coming = collections.Counter(ticket.min_version.step + max_lag_steps for ticket in self._coming())
        per_update = self._rounds.groups_per_update
        return num_sequences(deadline, coming, update=step, left=left, per_update=per_update)

    def is_open(self, ticket_id: str) -> bool:
        """Returns True if the ticket is issued and not consumed."""
        return ticket_id in self._open

    def ticket(self, ticket_id: str) -> Ticket:
        """Returns an open ticket; raises KeyError if it is not open."""
        return self._open[ticket_id]

    def source(self, ticket_id: str) -> str:
        """Returns the source of the ticket's problem (`learner.data.problem.Problem.source`), or an empty string."""
        return self._sources.get(ticket_id, "")

    def replace(self, ticket_id: str, *, is_filtered: bool = False) -> Ticket:
        """Replaces the problem of an open ticket whose group cannot be made or trained.

        `is_filtered` marks a group without learning signal, which is counted (`may_replace`).
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
        """Reissues an open ticket, with a later minimum version where lag decides; returns the renewed ticket."""
        ticket = self._open[ticket_id]
        self._open[ticket_id] = ticket = dataclasses.replace(ticket, min_version=self._renewed_version(ticket))
        return ticket

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Records an open ticket's group as arrived; returns the losers of the race that it decides, if any.

        Raises KeyError if the ticket is not open.
        """
        if ticket_id not in self._open:
            raise KeyError(ticket_id)
        self._arrived.add(ticket_id)
        return []

    def forget_arrival(self, ticket_id: str) -> None:
        """Records that an arrived group is lost; its ticket stays open."""
        self._arrived.discard(ticket_id)

    def consume(self, ticket_id: str) -> Consumed:
        """Records a group as trained; raises KeyError if its ticket is not open: it must not be trained then."""
        if self.num_left_in_update == self._rounds.groups_per_update:
            for ticket in self._update:  # these tickets cannot be reopened any more
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
        """Reopens the tickets of the most recent update, whose groups were consumed but not trained."""
        tickets, self._update = self._update, []
        self._open |= {t.id: t for t in tickets}
        self._num_consumed -= len(tickets)
        return tickets

    def reissue_open(self, *, step: int, keep: Collection[str] = ()) -> list[Ticket]:
        """Renews and returns open tickets, except those in `keep`, for this learner's weights of `step` or later."""
        version = Version(incarnation=self._incarnation, step=step)
        renewed = [dataclasses.replace(t, min_version=version) for t in self.open_tickets if t.id not in keep]
        self._open |= {t.id: t for t in renewed}
        return renewed

    def get_state(self) -> dict[str, Any]:
        """Returns the state except the tickets' contents (`open_tickets`, `long_queue`); JSON."""
        return {
            "num_issued": self._num_issued,
            "num_consumed": self._num_consumed,
            "num_deferred": self._num_deferred,
            "round_is_long": self.round_is_long,
            "num_replaced_in_round": self._num_replaced_in_round,
            "sources": {i: self._sources[i] for i in sorted(self._kept_ids() & self._sources.keys())},
        }

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Restores the state that `get_state` returned; raises ValueError if the ticket counts are inconsistent."""
        del long_queue  # used by the planners
        if state["num_consumed"] + state["num_deferred"] + len(open_tickets) != state["num_issued"]:
            raise ValueError(
                f"checkpoint: consumed + deferred + open tickets must be the {state['num_issued']} issued, got "
                f"{state['num_consumed']} + {state['num_deferred']} + {len(open_tickets)}"
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
        """Returns ids of tickets whose prompts are in use now or later."""
        return self._open.keys() | {t.id for t in self.long_queue}

    def _set_source(self, ticket_id: str, source: str) -> None:
        self._sources.pop(ticket_id, None)
        if source:
            self._sources[ticket_id] = source

    def _make_ticket(self, prompt: Problem | Ticket, *, round: int, num_requests: int, min_version: Version) -> Ticket:
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
        # A prompt that lost a race returns as another ticket.
        source = self._sources.pop(prompt.id, "") if isinstance(prompt, Ticket) else prompt.source
        self._set_source(ticket.id, source)
        return ticket


def training_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Returns the sampling parameters of training responses."""
    return Sampling(
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=stop_token_ids,
    )
