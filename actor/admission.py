"""Admission: which tickets an actor has in service (fifo, frontier or window policy). Pure: no engine, no clock.

The policy applies to train tickets. Probes and evaluations go first and use engine capacity only.

* fifo: as many tickets as the engine has capacity for, counted in sequences.
* frontier(width): frontier-group dispatch (RolloutPipe section 3.3, eq. 5-6; docs/design/streaming.md): only the
  `width` lowest orders that are not serving-complete. A slot frees when all requests of a group have finished, before
  their rewards are known. The store applies the limit to claims, for all actors together (`bridge/store/claim.py`).
* window(sequences): in-flight generation (PipelineRL Algorithm 2): a fixed number of sequences, split over the actors.
  One spare ticket is claimed ahead so that no slot waits for a claim, unless a lag bound makes tickets scarce.

Of single-sample tickets one claim takes at most this actor's share of each group, ceil(K slots / slots of all engines)
(`samples_per_engine`): a whole group would run a long prompt's long responses on one engine (prompt replication, ROLL
Flash).

A ticket that requires newer weights waits without a slot while servable tickets pass it. It still counts in
`num_to_claim`: its weights arrive shortly, and an actor that lags behind must not drain the store.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from bridge.rollout_types import Ticket, Version
from configs.schema import Config

Policy = Literal["fifo", "frontier", "window"]


@dataclasses.dataclass(slots=True)
class _Served:
    ticket: Ticket
    num_left: int
    """Unfinished requests."""


class Admission:
    """Claimed tickets: waiting, or in service until their last request has finished."""

    def __init__(
        self,
        policy: Policy,
        *,
        width: int = 0,
        max_sequences: int,
        samples_per_group: int,
        tickets_per_group: int = 1,
        sequences: int | None = None,
        num_spare: int = 0,
        max_in_flight: int = 0,
    ) -> None:
        """`sequences` is H, which a window keeps in progress over all engines; None means this engine's capacity.

        `num_spare` tickets are claimed in addition to those that can start. `max_in_flight` bounds concurrent episodes;
        above `max_sequences`, the excess waits inside the engine, by order.
        """
        if min(max_sequences, samples_per_group, tickets_per_group) < 1 or width < 0:
            raise ValueError(
                f"admission.policy={policy}: bounds must be >= 1 (width >= 0), got width={width} "
                f"max_sequences={max_sequences} samples_per_group={samples_per_group} "
                f"tickets_per_group={tickets_per_group}"
            )
        self.policy: Policy = policy
        self.width = width
        """Frontier width, in groups. May change at any time, also below the number of groups in service. 0: only the
        store's width applies."""
        self.max_sequences = max_sequences
        """Maximum concurrent sequences."""
        self.max_in_flight = max_in_flight
        self._sequences = sequences
        self._part = sequences
        """Share of a window for this engine, in sequences; `capacity` bounds it."""
        self._num_spare = num_spare
        self.num_engines = 1
        """Engines that share the tickets, including this one."""
        self._shared_places = 0
        self._requests_per_ticket = -(-samples_per_group // tickets_per_group)
        self.tickets_per_group = tickets_per_group
        """Tickets of a training group: its requests with admission.unit=sample, otherwise 1."""
        self._waiting: dict[str, Ticket] = {}
        self._served: dict[str, _Served] = {}

    @classmethod
    def of(cls, config: Config, *, max_sequences: int | None = None) -> "Admission":
        """Returns an actor's admission under a run's configuration; `max_sequences` overrides its engine size."""
        num_requests = config.rounds.requests_per_group
        return cls(
            config.admission.policy,
            width=config.admission_width,
            max_sequences=max_sequences or config.actor.max_num_seqs,
            samples_per_group=num_requests,
            tickets_per_group=num_requests if config.admission.unit == "sample" else 1,
            sequences=config.sequences if config.admission.policy == "window" else None,
            max_in_flight=config.environments.max_in_flight if config.environments_played else 0,
            num_spare=int(config.admission.policy == "window" and config.max_lag_steps is None),
        )

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets claimed but not admitted, lowest order first."""
        return sorted(self._waiting.values(), key=_rank)

    @property
    def in_service(self) -> list[Ticket]:
        """Tickets admitted and not serving-complete, lowest order first."""
        return sorted((s.ticket for s in self._served.values()), key=_rank)

    @property
    def num_sequences(self) -> int:
        """Unfinished requests in service, including those of episodes that wait for their environments."""
        return sum(s.num_left for s in self._served.values())

    @property
    def capacity(self) -> int:
        """Maximum requests in service, regardless of window share and frontier."""
        return max(self.max_sequences, self.max_in_flight)

    @property
    def num_free(self) -> int:
        """Requests of train tickets that may start now; negative if more run than allowed."""
        num_free = self.capacity - self.num_sequences
        if self._part is None:
            return num_free
        return min(num_free, self._part - sum(s.num_left for s in self._served.values() if not _is_pinned(s.ticket)))

    def rebalance(self, engines: Mapping[int, int]) -> None:
        """Updates this engine's share; `engines` maps concurrent sequences per engine to the number of such engines."""
        self.num_engines = sum(engines.values())
        self._shared_places = sum(size * num for size, num in engines.items())
        if self._sequences is not None:
            self._part = sequences_per_engine(self._sequences, engines)

    @property
    def samples_per_engine(self) -> int | None:
        """Share of a group for this engine, in single-sample tickets; None if groups are not split."""
        if self.tickets_per_group == 1 or self.num_engines == 1:
            return None
        return -(-self.tickets_per_group * self.capacity // self.all_places)

    @property
    def all_places(self) -> int:
        """Concurrent requests over all engines that share the tickets, as last reported."""
        return max(self.capacity, self._shared_places)

    def num_to_claim(self) -> int:
        """Returns the number of tickets to claim now: those that can start, and a window's spare tickets."""
        free = -(-max(0, self.num_free) // self._requests_per_ticket) + self._num_spare
        return max(0, free - len(self._waiting))

    def offer(self, tickets: Iterable[Ticket]) -> None:
        """Adds claimed tickets. Raises ValueError if a ticket was offered twice."""
        for ticket in tickets:
            if ticket.id in self._waiting or ticket.id in self._served:
                raise ValueError(f"ticket {ticket.id} was offered twice")
            self._waiting[ticket.id] = ticket

    def admit(self, served: Version | None) -> list[Ticket]:
        """Moves tickets that can start on the served weights into service, and returns them, lowest order first."""
        admitted = []
        for ticket in self.waiting:
            if served is None or ticket.min_version > served:
                continue
            if not self._has_room(ticket):
                break  # all later tickets have a higher order
            del self._waiting[ticket.id]
            self._served[ticket.id] = _Served(ticket, ticket.num_requests)
            admitted.append(ticket)
        return admitted

    def finish_sample(self, ticket_id: str, count: int = 1) -> bool:
        """Marks requests as finished; returns True if they were the ticket's last, which frees its slot."""
        entry = self._served[ticket_id]
        entry.num_left -= count
        if entry.num_left == 0:
            del self._served[ticket_id]
        return entry.num_left == 0

    def remove(self, ticket_id: str) -> None:
        """Removes a ticket, waiting or in service. Ignores unknown ids."""
        self._waiting.pop(ticket_id, None)
        self._served.pop(ticket_id, None)

    def _has_room(self, ticket: Ticket) -> bool:
        # A group may start with too few free slots: the excess waits inside the engine, by order.
        if _is_pinned(ticket):
            return self.capacity > self.num_sequences
        if self.policy != "frontier" or not self.width:
            return self.num_free > 0
        groups = {s.ticket.order for s in self._served.values() if not _is_pinned(s.ticket)}
        return ticket.order in groups or len(groups) < self.width


def sequences_per_engine(total: int, engines: Mapping[int, int]) -> int:
    """Returns one engine's share of `total` (H) sequences; `engines` counts engines by their concurrent sequences.

    Shares are equal; the part that exceeds a small engine's size goes to the larger ones.
    """
    num_left, left = sum(engines.values()), total
    for size, num in sorted(engines.items()):
        if size * num_left >= left:
            return -(-left // num_left)
        left -= size * num
        num_left -= num
    return total  # all are smaller than their share, so their size is the bound


def _is_pinned(ticket: Ticket) -> bool:
    return ticket.kind != "train"


def _rank(ticket: Ticket) -> tuple[bool, int, str]:
    return (not _is_pinned(ticket), ticket.order, ticket.id)
