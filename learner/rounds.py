"""Plans rounds: which tickets exist, and when a round or an update is full. Pure: no jax, no clock.

Tickets are the only credit in the system: what is not issued is not generated, so nothing
downstream can overflow. Two ways to issue (DESIGN.md section 4):

* by rounds (publish at the round's end): R tickets at once, the next R when all of them are
  consumed and the new weights are published;
* by window (publish every n steps): a fixed number of groups outstanding, one more for each consumed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from bridge.types import Sampling, Ticket, Version
from configs.schema import Config
from learner.problems import Problem


@dataclasses.dataclass(frozen=True)
class Consumed:
    """What consuming one group completed."""

    ends_update: bool
    ends_round: bool


class RoundPlanner:
    """Issues tickets and keeps the books of a run's groups.

    Every order is issued once, in sequence; a group that is dropped is issued again under the same id
    and stays open, so consumed + open = issued at any time.
    """

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts before the first round."""
        self._rounds = config.rounds
        self._by_round = config.publish.when == "round_end"
        self._width = config.admission_width
        if config.rounds.max_lag_steps is not None:
            # Served in order, a group is trained after at most so many others. One that others overtake may still
            # grow too old; the queue drops it.
            bound = (config.rounds.max_lag_steps + 1) * config.rounds.groups_per_update
            self._width = min(self._width, bound)
        self._sampling = sampling
        self._next_problem = next_problem
        self._incarnation = incarnation
        self._open: dict[str, Ticket] = {}
        self._num_issued = 0
        self._num_consumed = 0

    @property
    def open_tickets(self) -> list[Ticket]:
        """Issued and not consumed, in order."""
        return sorted(self._open.values(), key=lambda t: t.order)

    @property
    def num_outstanding(self) -> int:
        """Groups issued and not consumed."""
        return len(self._open)

    @property
    def num_left_in_update(self) -> int:
        """Groups that the update now being filled still wants."""
        per_update = self._rounds.groups_per_update
        return per_update - self._num_consumed % per_update

    @property
    def round(self) -> int:
        """The round now being consumed, from 0."""
        return self._num_consumed // self._rounds.groups_per_round

    def is_open(self, ticket_id: str) -> bool:
        """Whether this ticket's group is still wanted."""
        return ticket_id in self._open

    def min_step(self, ticket_id: str) -> int:
        """The earliest step of weights that an open ticket takes."""
        return self._open[ticket_id].min_version.step

    def replace(self, ticket_id: str) -> Ticket:
        """Another problem under an open ticket's id: for one that no group can be made for."""
        problem = self._next_problem()
        ticket = dataclasses.replace(self._open[ticket_id], prompt_tokens=problem.prompt_tokens, task=problem.task)
        self._open[ticket_id] = ticket
        return ticket

    def issue(self, *, step: int) -> list[Ticket]:
        """The tickets due now; samples must come from weights of `step` on (by rounds) or of any."""
        tickets = []
        while self._has_credit():
            tickets.append(self._make_ticket(step if self._by_round else 0))
        return tickets

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists: a restarted learner meeting a group that it had asked for."""
        tickets = []
        while self._num_issued <= order:
            tickets.append(self._make_ticket(step if self._by_round else 0))
        return tickets

    def consume(self, ticket_id: str) -> Consumed:
        """Books a group as trained.

        Raises:
          KeyError: the ticket is not open; its group must not be trained.
        """
        del self._open[ticket_id]
        self._num_consumed += 1
        return Consumed(
            ends_update=self._num_consumed % self._rounds.groups_per_update == 0,
            ends_round=self._num_consumed % self._rounds.groups_per_round == 0,
        )

    def get_state(self) -> dict[str, Any]:
        """Everything but the open tickets' contents (`open_tickets`); JSON."""
        return {"num_issued": self._num_issued, "num_consumed": self._num_consumed}

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket]) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: the books don't add up.
        """
        if state["num_consumed"] + len(open_tickets) != state["num_issued"]:
            raise ValueError(
                f"{state['num_issued']} tickets issued, {state['num_consumed']} consumed, "
                f"{len(open_tickets)} open: the checkpoint's books don't add up"
            )
        self._num_issued = state["num_issued"]
        self._num_consumed = state["num_consumed"]
        self._open = {t.id: t for t in open_tickets}

    def _has_credit(self) -> bool:
        if not self._by_round:
            return len(self._open) < self._width
        full_rounds = -(-self._num_issued // self._rounds.groups_per_round)
        round_is_open = self._num_issued % self._rounds.groups_per_round != 0
        return round_is_open or self._num_consumed == full_rounds * self._rounds.groups_per_round

    def _make_ticket(self, min_step: int) -> Ticket:
        problem = self._next_problem()
        order = self._num_issued
        ticket = Ticket(
            id=f"{order:09d}",
            kind="train",
            round=order // self._rounds.groups_per_round,
            order=order,
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            num_samples=self._rounds.samples_per_group,
            num_requests=self._rounds.samples_per_group,
            sampling=self._sampling,
            min_version=Version(incarnation=self._incarnation if self._by_round else 0, step=min_step),
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
