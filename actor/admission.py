"""Which tickets an actor has in service: frontier-group dispatch or another policy. Pure: no engine, no clock.

Train tickets obey the policy:

* fifo: as many as the engine has room for, counted in sequences;
* frontier(width): frontier-group dispatch (FGD, RolloutPipe section 3.3, eq. 5-6; docs/frontier.md). F is the
  `width` lowest orders among the groups that are not serving-complete, and a request is admitted if and only if its
  group is in F. A slot frees when all requests of a group have ended, whether or not its rewards are known. Several
  actors serve one frontier: the store hands out what is in it (`bridge/store/claim.py`);
* window(sequences): in-flight generation (PipelineRL Algorithm 2). So many sequences in progress, as one ends the next
  begins; of several actors each has its part of them (`sequences_per_engine`). A ticket more is kept in hand, so that
  no place waits for a claim; but not under a bound on the lag, where tickets are few and one in hand is another
  engine's idle place.

A group is told by its order: tickets of single samples share their group's. Of those an actor takes its part of a
group, ceil(K places / places of all engines), before any more of it (`samples_per_engine`): else whoever claims all
that it has room for would take whole groups, and a long prompt's long responses would run on one engine after all
(prompt replication, ROLL Flash). It takes so much of as many groups as it has room for in one claim: claimed group by
group, a round's last samples would begin when its first have ended.

The store is the deferred queue: it hands out the lowest orders first, and `num_to_claim` asks only for
what could start now, so the rest stays there for other actors. Evaluations and probes go first, take
only room in the engine, and leave the frontier alone.

A ticket that wants newer weights than the ones served waits in hand and takes no slot; servable ones of
a higher order pass it. But it counts in `num_to_claim`: its weights exist already (the learner issues
after it publishes), so they are a moment away, and an actor that is behind must not drain the store.
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
    """Requests that have not ended."""


class Admission:
    """The tickets in hand: waiting, and in service until their last request has ended."""

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
        """Nothing is in hand.

        Args:
          policy: fifo, frontier or window.
          width: groups of the frontier.
          max_sequences: what the engine runs at once.
          samples_per_group: requests of a group.
          tickets_per_group: tickets that a group comes in: 1, or as many as it has requests.
          sequences: H, what a window keeps in progress on all engines together; None for what this engine runs.
          num_spare: tickets of a window kept in hand besides those that could start.
          max_in_flight: episodes at once, those in their environments included, where that is more than the engine
            runs; then what is over waits inside the engine, by order.

        Raises:
          ValueError: a bound below one.
        """
        if min(max_sequences, samples_per_group, tickets_per_group) < 1 or (policy == "frontier" and width < 1):
            raise ValueError(
                f"admission {policy} wants bounds >= 1, got width={width} max_sequences={max_sequences} "
                f"samples_per_group={samples_per_group} tickets_per_group={tickets_per_group}"
            )
        self.policy: Policy = policy
        self.width = width
        """Groups of the frontier; may be changed at any time, also below what is in service."""
        self.max_sequences = max_sequences
        """What may run at once; may be changed at any time, also below what runs."""
        self.max_in_flight = max_in_flight
        self._sequences = sequences
        self._part = sequences
        """This engine's part of a window, where it has places for it."""
        self._num_spare = num_spare
        self.num_engines = 1
        """That share the tickets, this one among them."""
        self._shared_places = 0
        self._requests_per_ticket = -(-samples_per_group // tickets_per_group)
        self._tickets_per_group = tickets_per_group
        self._waiting: dict[str, Ticket] = {}
        self._served: dict[str, _Served] = {}

    @classmethod
    def of(cls, config: Config, *, max_sequences: int | None = None) -> "Admission":
        """An actor's admission under a run's configuration; `max_sequences` for an engine of another size."""
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
        """Claimed but not admitted, lowest order first."""
        return sorted(self._waiting.values(), key=_rank)

    @property
    def in_service(self) -> list[Ticket]:
        """Admitted and not serving-complete, lowest order first."""
        return sorted((s.ticket for s in self._served.values()), key=_rank)

    @property
    def num_sequences(self) -> int:
        """Requests that have not ended; those of episodes may be in their environments just now."""
        return sum(s.num_left for s in self._served.values())

    @property
    def capacity(self) -> int:
        """Requests that may be in service at once, whatever else bounds them."""
        return max(self.max_sequences, self.max_in_flight)

    @property
    def num_free(self) -> int:
        """Requests that may begin now; below 0 where more run than may."""
        bound = self.capacity if self._part is None else min(self._part, self.capacity)
        return bound - self.num_sequences

    def rebalance(self, engines: Mapping[int, int]) -> None:
        """From here on so many engines serve, this one among them, by the sequences that each runs at once."""
        self.num_engines = sum(engines.values())
        self._shared_places = sum(size * num for size, num in engines.items())
        if self._sequences is not None:
            self._part = sequences_per_engine(self._sequences, engines)

    @property
    def samples_per_engine(self) -> int | None:
        """Single samples of a group that are this engine's part of it; None where there is nothing to share."""
        if self._tickets_per_group == 1 or self.num_engines == 1:
            return None
        return -(-self._tickets_per_group * self.capacity // self.all_places)

    @property
    def all_places(self) -> int:
        """Places of all engines that share the tickets, as they last said."""
        return max(self.capacity, self._shared_places)

    def num_to_claim(self) -> int:
        """How many tickets to claim now: those that could start, and the spare ones of a window."""
        if self.policy == "frontier":
            num_train = sum(not _is_pinned(s.ticket) for s in self._served.values())
            free = max(0, self.width * self._tickets_per_group - num_train)
        else:
            free = -(-max(0, self.num_free) // self._requests_per_ticket) + self._num_spare
        return max(0, free - len(self._waiting))

    def offer(self, tickets: Iterable[Ticket]) -> None:
        """Takes claimed tickets.

        Raises:
          ValueError: one is here already.
        """
        for ticket in tickets:
            if ticket.id in self._waiting or ticket.id in self._served:
                raise ValueError(f"ticket {ticket.id} was offered twice")
            self._waiting[ticket.id] = ticket

    def admit(self, served: Version | None) -> list[Ticket]:
        """Moves into service what may start on the weights now served, lowest order first."""
        admitted = []
        for ticket in self.waiting:
            if served is None or ticket.min_version > served:
                continue
            if not self._has_room(ticket):
                break  # whatever follows is of a higher order
            del self._waiting[ticket.id]
            self._served[ticket.id] = _Served(ticket, ticket.num_requests)
            admitted.append(ticket)
        return admitted

    def finish_sample(self, ticket_id: str, count: int = 1) -> bool:
        """Books requests as ended; after the ticket's last one its slot is free, and the result is True.

        Raises:
          KeyError: the ticket is not in service.
        """
        entry = self._served[ticket_id]
        entry.num_left -= count
        if entry.num_left == 0:
            del self._served[ticket_id]
        return entry.num_left == 0

    def remove(self, ticket_id: str) -> None:
        """Forgets a ticket, wherever it is; an unknown one is fine."""
        self._waiting.pop(ticket_id, None)
        self._served.pop(ticket_id, None)

    def _has_room(self, ticket: Ticket) -> bool:
        # A group may start in a place too small for it: what is over waits inside the engine, by order.
        if _is_pinned(ticket) or self.policy != "frontier":
            return self.num_free > 0
        groups = {s.ticket.order for s in self._served.values() if not _is_pinned(s.ticket)}
        return ticket.order in groups or len(groups) < self.width


def sequences_per_engine(total: int, engines: Mapping[int, int]) -> int:
    """An engine's part of the sequences that all keep in service, if it has places for it.

    Equal parts; what an engine is too small for goes to the larger ones.

    Args:
      total: H.
      engines: how many there are, by the sequences that each runs at once.
    """
    num_left, left = sum(engines.values()), total
    for size, num in sorted(engines.items()):
        if size * num_left >= left:
            return -(-left // num_left)
        left -= size * num
        num_left -= num
    return total  # all have less than their part: their places are the bound


def _is_pinned(ticket: Ticket) -> bool:
    return ticket.kind != "train"


def _rank(ticket: Ticket) -> tuple[bool, int, str]:
    return (not _is_pinned(ticket), ticket.order, ticket.id)
