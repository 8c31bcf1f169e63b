"""Plans rounds: which tickets exist, and when a round or an update is full. Pure: no jax, no clock.

Tickets are the only credit in the system: what is not issued is not generated, so nothing
downstream can overflow. Two ways to issue (DESIGN.md section 4):

* by rounds (publish at the round's end): a round's tickets at once, the next ones when R groups of it are
  consumed and the new weights are published;
* by window (publish every n steps): a fixed number of groups outstanding, one more for each consumed; with an async
  ratio alpha (ROLL Flash) or a lag bound, only for the update being filled and so many after it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from bridge.types import Sampling, Ticket, Version
from configs.schema import Config
from learner.data.problems import Problem

MAX_REPLACED_PER_GROUP = 10
"""Prompts that a filter may throw away in a round, for each of its groups; then it lets groups pass."""


@dataclasses.dataclass(frozen=True)
class Consumed:
    """What consuming one group completed."""

    ends_update: bool
    ends_round: bool


class RoundPlanner:
    """Issues tickets and keeps the books of a run's groups.

    Every order is issued once, in sequence. A group that is dropped is issued again under the same id and stays
    open; a prompt that lost its round's race is deferred and comes back under a new order. So
    consumed + open + deferred = issued at any time.

    Tail batching (RollPacker section 3): a short round issues eta_P R prompts and closes when R groups have arrived;
    the losers' prompts go to the long-prompt queue, first in, first out. A round that starts with R prompts in there is
    a long one: it takes the oldest R and no others, and nobody races. A short round adds n = eta_P R - R prompts, so a
    prompt is back after at most ceil(R / n) + 1 rounds, or twice that where R are before it (`max_rounds_deferred`).
    """

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts before the first round."""
        self._rounds = config.rounds
        self._by_round = config.publish.when == "round_end"
        self._width = config.admission_width
        # The updates that tickets may be issued ahead for: served in order, a group's lag is at most that.
        ahead = [x for x in (config.admission.async_ratio, config.rounds.max_lag_steps) if x is not None]
        self._updates_ahead = min(ahead) if ahead else None
        self._async_ratio = config.admission.async_ratio
        self._publish_every = config.publish.every_n_steps
        self._sampling = sampling
        self._next_problem = next_problem
        self._incarnation = incarnation
        self._open: dict[str, Ticket] = {}
        self._arrived: set[str] = set()
        self._long_queue: collections.deque[Ticket] = collections.deque()
        self._update: list[Ticket] = []
        self._num_issued = 0
        self._num_consumed = 0
        self._num_deferred = 0
        self._num_replaced_in_round = 0
        self.round_is_long = False
        """Whether the round now open is one of the long-prompt queue's."""

    @property
    def open_tickets(self) -> list[Ticket]:
        """Issued and not consumed, in order."""
        return sorted(self._open.values(), key=lambda t: t.order)

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long round, the oldest first; as tickets of the rounds they lost."""
        return list(self._long_queue)

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
    def max_rounds_deferred(self) -> int:
        """A bound on the rounds between the one a prompt loses and the long one it comes back in; 0 without a race."""
        num_losers = self._rounds.groups_issued - self._rounds.groups_per_round
        if num_losers == 0:
            return 0
        period = -(-self._rounds.groups_per_round // num_losers) + 1
        return period * -(-(self._rounds.groups_per_round + num_losers) // self._rounds.groups_per_round)

    @property
    def may_replace(self) -> bool:
        """Whether the round has had few enough prompts replaced; a bound on what a filter can throw away."""
        return self._num_replaced_in_round < MAX_REPLACED_PER_GROUP * self._rounds.groups_per_round

    def is_open(self, ticket_id: str) -> bool:
        """Whether this ticket's group is still wanted."""
        return ticket_id in self._open

    def ticket(self, ticket_id: str) -> Ticket:
        """An open ticket.

        Raises:
          KeyError: it is not open.
        """
        return self._open[ticket_id]

    def min_step(self, ticket_id: str) -> int:
        """The earliest step of weights that an open ticket takes."""
        return self._open[ticket_id].min_version.step

    def replace(self, ticket_id: str) -> Ticket:
        """Another problem under an open ticket's id: for one that no group can be made for, or that teaches nothing."""
        problem = self._next_problem()
        ticket = dataclasses.replace(self._open[ticket_id], prompt_tokens=problem.prompt_tokens, task=problem.task)
        self._open[ticket_id] = ticket
        self._arrived.discard(ticket_id)
        self._num_replaced_in_round += 1
        return ticket

    def issue(self, *, step: int) -> list[Ticket]:
        """The tickets due now.

        By rounds their samples must come from weights of `step` on; by window from any, but with an async ratio from
        ones that are at most alpha steps (rounded up) old when the ticket's turn comes.
        """
        if self._by_round:
            return [] if self._open else self._start_round(step)
        tickets = []
        while len(self._open) < self._width and self._is_in_reach(step):
            tickets.append(self._make_ticket(self._next_problem(), step=self._earliest_step(step)))
        return tickets

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists: a restarted learner meeting a group that it had asked for."""
        tickets = []
        while self._num_issued <= order:
            if self._by_round:
                new = self.issue(step=step)
                if not new:
                    break  # of a round that is not due yet
                tickets += new
            else:
                tickets.append(self._make_ticket(self._next_problem(), step=self._earliest_step(step)))
        return tickets

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Books an open ticket's complete group as here; returns the tickets that nobody waits for any more.

        Those are the losers of an over-provisioned round that has R groups with this one.

        Raises:
          KeyError: the ticket is not open.
        """
        if ticket_id not in self._open:
            raise KeyError(ticket_id)
        self._arrived.add(ticket_id)
        if not self._by_round or len(self._arrived) < self.num_left_in_round:
            return []
        losers = [t for t in self.open_tickets if t.id not in self._arrived]
        for ticket in losers:
            del self._open[ticket.id]
        self._long_queue += losers
        self._num_deferred += len(losers)
        return losers

    def depart(self, ticket_id: str) -> None:
        """Books a group that had arrived as gone again; it is still wanted."""
        self._arrived.discard(ticket_id)

    def renew(self, *, step: int, keep: Collection[str] = ()) -> list[Ticket]:
        """Asks for open tickets anew, from weights of `step` on; but for those in `keep`. For a window.

        Returns them as they are now.
        """
        renewed = [
            dataclasses.replace(t, min_version=dataclasses.replace(t.min_version, step=step))
            for t in self.open_tickets
            if t.id not in keep
        ]
        self._open |= {t.id: t for t in renewed}
        return renewed

    def consume(self, ticket_id: str) -> Consumed:
        """Books a group as trained.

        Raises:
          KeyError: the ticket is not open; its group must not be trained.
        """
        if self.num_left_in_update == self._rounds.groups_per_update:
            self._update = []
        if self.num_left_in_round == self._rounds.groups_per_round:
            self._num_replaced_in_round = 0
        self._update.append(self._open.pop(ticket_id))
        self._arrived.discard(ticket_id)
        self._num_consumed += 1
        return Consumed(
            ends_update=self._num_consumed % self._rounds.groups_per_update == 0,
            ends_round=self._num_consumed % self._rounds.groups_per_round == 0,
        )

    def put_back(self) -> list[Ticket]:
        """Opens the tickets of the update last consumed again: its groups were not trained after all."""
        tickets, self._update = self._update, []
        self._open |= {t.id: t for t in tickets}
        self._num_consumed -= len(tickets)
        return tickets

    def get_state(self) -> dict[str, Any]:
        """Everything but the tickets' contents (`open_tickets`, `long_queue`); JSON."""
        return {
            "num_issued": self._num_issued,
            "num_consumed": self._num_consumed,
            "num_deferred": self._num_deferred,
            "round_is_long": self.round_is_long,
        }

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: the books don't add up.
        """
        if state["num_consumed"] + state["num_deferred"] + len(open_tickets) != state["num_issued"]:
            raise ValueError(
                f"{state['num_issued']} tickets issued, {state['num_consumed']} consumed, "
                f"{state['num_deferred']} deferred, {len(open_tickets)} open: the checkpoint's books don't add up"
            )
        self._num_issued = state["num_issued"]
        self._num_consumed = state["num_consumed"]
        self._num_deferred = state["num_deferred"]
        self.round_is_long = state["round_is_long"]
        self._open = {t.id: t for t in open_tickets}
        self._long_queue = collections.deque(long_queue)
        self._arrived, self._update = set(), []

    def _is_in_reach(self, step: int) -> bool:
        """Whether the next order's update is at most alpha, or the lag bound, after the one being filled."""
        ahead = self._updates_ahead
        return ahead is None or self._num_issued + 1 <= (step + 1 + ahead) * self._rounds.groups_per_update

    def _earliest_step(self, step: int) -> int:
        """The oldest weights that the next order of a window may begin on; never ones that are not published yet."""
        if self._async_ratio is None:
            return 0
        update = self._num_issued // self._rounds.groups_per_update
        published = step - step % self._publish_every
        return max(0, min(update - math.ceil(self._async_ratio), published))

    def _start_round(self, step: int) -> list[Ticket]:
        self._arrived = set()
        self.round_is_long = len(self._long_queue) >= self._rounds.groups_per_round
        if self.round_is_long:
            prompts = [self._long_queue.popleft() for _ in range(self._rounds.groups_per_round)]
            return [self._make_ticket(p, step=step) for p in prompts]
        num_requests = self._rounds.requests_per_group
        return [
            self._make_ticket(self._next_problem(), step=step, num_requests=num_requests)
            for _ in range(self._rounds.groups_issued)
        ]

    def _make_ticket(self, prompt: Problem | Ticket, *, step: int, num_requests: int | None = None) -> Ticket:
        order = self._num_issued
        if not self._by_round:
            num_requests = self._rounds.requests_per_group
        ticket = Ticket(
            id=f"{order:09d}",
            kind="train",
            round=self.round if self._by_round else order // self._rounds.groups_per_round,
            order=order,
            prompt_tokens=prompt.prompt_tokens,
            task=prompt.task,
            num_samples=self._rounds.samples_per_group,
            num_requests=num_requests or self._rounds.samples_per_group,
            sampling=self._sampling,
            min_version=Version(incarnation=self._incarnation if self._by_round else 0, step=step),
        )
        self._num_issued += 1
        self._open[ticket.id] = ticket
        return ticket


def pinned_tickets(
    kind: str,
    problems: list[tuple[Problem, int]],
    sampling: Sampling,
    *,
    version: Version,
    round: int,
) -> list[Ticket]:
    """Tickets that must be sampled by exactly the weights now published: evaluations and probes.

    `problems` are (problem, samples) pairs. Their orders are negative, so they are served first.
    """
    if kind not in ("eval", "probe"):
        raise ValueError(f"kind must be eval or probe, got {kind!r}")
    base = {"probe": -2_000_000_000, "eval": -1_000_000_000}[kind]
    return [
        Ticket(
            id=f"{kind}-{version}-{i:06d}",
            kind=kind,
            round=round,
            order=base + i,
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            num_samples=num_samples,
            num_requests=num_samples,
            sampling=sampling,
            min_version=version,
        )
        for i, (problem, num_samples) in enumerate(problems)
    ]


def training_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How training responses are sampled."""
    return Sampling(
        max_tokens=config.sampling.max_response_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=stop_token_ids,
    )
