"""Groups whose samples are separate tickets, so that several engines can serve one prompt.

The planner tracks groups, while actors claim single samples. This store splits a group's ticket into sample tickets,
and assembles the group when K samples have arrived, from any actor (ROLL Flash's queue scheduling and prompt
replication). Of an over-provisioned group the first K samples to arrive win.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from typing_extensions import override

from bridge.rollout_types import Group, Ticket, Version, newest_of_each
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import StoredGroup
from configs.schema import Config
from learner.schedule.group_filter import TicketStore


class GroupTickets(TicketStore, Protocol):
    """Tickets of whole training groups, with the methods of `bridge.store.sql.learner_side.LearnerStore`."""

    def read_groups(self, *, after_seq: int, limit: int) -> list[StoredGroup]:
        """Returns unacknowledged groups with numbers above `after_seq`, in order of arrival."""
        ...

    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        """Rolls the store back to a checkpoint."""
        ...

    def failed(self) -> dict[str, str]:
        """Returns the failed tickets and their errors."""
        ...

    def fence(self, actor: str, reason: str, *, trained: Sequence[str] = ()) -> None:
        """Rejects an actor's further claims and groups; reissues its tickets except the `trained` ones."""
        ...

    def num_unclaimed(self) -> int:
        """Returns the number of tickets that no actor has claimed."""
        ...


def tickets_of(store: LearnerStore, config: Config, is_open: Callable[[str], bool]) -> GroupTickets:
    """Returns the run's training tickets by group, also if samples are separate tickets (`admission.unit`).

    `is_open` returns True if a group's ticket is issued and not trained.
    """
    if config.admission.unit == "group":
        return store
    rounds = config.rounds
    sizes = {"num_samples": rounds.samples_per_group, "num_requests": rounds.requests_per_group}
    return SampleTickets(store, **sizes, is_open=is_open)


class SampleTickets(GroupTickets):
    """Group tickets over the store that actors use: sample i of training group g is the ticket "g.i".

    `put_tickets`, `reissue` and `roll_back` return numbers of samples; `num_unclaimed` returns whole groups, rounded
    up.
    """

    def __init__(
        self,
        store: LearnerStore,
        *,
        num_samples: int,
        num_requests: int,
        is_open: Callable[[str], bool] = lambda group: True,
    ) -> None:
        """Creates a store of groups of K samples, each split into `num_requests` tickets.

        Once `is_open` returns False for a complete group, its samples are no longer kept in memory.
        """
        self._store, self._is_open = store, is_open
        self._num_samples, self._num_requests = num_samples, num_requests
        self._tickets: dict[str, Ticket] = {}
        """Training tickets that were put, by group."""
        self._start_over()

    @override
    def put_tickets(self, tickets: Iterable[Ticket]) -> int:
        # After a restart, drop arrived samples that answer another prompt.
        parts: list[Ticket] = []
        for ticket in tickets:
            self._tickets[ticket.id] = ticket
            for index, part in list(self._parts.get(ticket.id, {}).items()):
                if not _answers(part, ticket):
                    del self._parts[ticket.id][index]
                    self._store.withdraw([part.ticket_id])
            parts += split(ticket)
        return self._store.put_tickets(parts)

    @override
    def read_groups(self, *, after_seq: int, limit: int) -> list[StoredGroup]:
        # The number of a group is its last sample's; a reader that continues from another number starts over.
        if after_seq != self._delivered_seq:
            self._start_over()
        self._samples = {id_: parts for id_, parts in self._samples.items() if self._is_open(id_)}
        groups: list[StoredGroup] = []
        while not groups:
            stored = self._store.read_groups(after_seq=self._after_seq, limit=limit)
            if not stored:
                break
            for s in stored:
                self._after_seq = s.seq
                if group := self._add(s.group):
                    groups.append(StoredGroup(s.seq, group))
                    self._delivered_seq = s.seq
        return groups

    @override
    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        for id_ in ticket_ids:
            self._tickets.pop(id_, None)
            self._complete.pop(id_, None)
            self._samples.pop(id_, None)
        self._store.acknowledge(self._ids(ticket_ids))

    @override
    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        ids: list[str] = []
        for id_ in ticket_ids:
            parts = self._samples.get(id_, {})
            kept = {i: p for i, p in parts.items() if older_than is not None and p.min_step >= older_than}
            self._forget([id_])
            if kept:
                self._parts[id_] = kept
                ids += [parts[i].ticket_id for i in parts.keys() - kept.keys()]
            else:
                ids += self._ids([id_])
        num_reissued = self._store.reissue(ids)
        # A decided race withdrew its other samples. Restore them for the next race: `failed` counts on them.
        self._store.put_tickets(
            [part for id_ in ticket_ids if id_ in self._tickets for part in split(self._tickets[id_])]
        )
        return num_reissued

    @override
    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        self._forget(ticket_ids)
        for id_ in ticket_ids:
            self._tickets.pop(id_, None)
        self._store.withdraw(self._ids(ticket_ids))

    @override
    def roll_back(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        return self._store.roll_back(self._ids(open_ids), next_order=next_order, step=step)

    @override
    def failed(self) -> dict[str, str]:
        # A race tolerates as many failed samples as it has beyond K.
        reasons: dict[str, list[str]] = {}
        for id_, reason in self._store.failed().items():
            reasons.setdefault(group_id(id_), []).append(reason)
        return {id_: given[-1] for id_, given in reasons.items() if len(given) > self._num_spare(id_)}

    @override
    def fence(self, actor: str, reason: str, *, trained: Sequence[str] = ()) -> None:
        for id_, parts in self._parts.items():
            self._parts[id_] = {i: g for i, g in parts.items() if actor not in g.actors}
        self._store.fence(actor, reason, trained=self._ids(trained))

    @override
    def num_unclaimed(self) -> int:
        return -(-self._store.num_unclaimed() // self._num_requests)

    def _start_over(self) -> None:
        self._after_seq = self._delivered_seq = 0
        self._parts: dict[str, dict[int, Group]] = {}
        self._complete: dict[str, frozenset[int]] = {}
        """Indices of the samples of each group that was delivered and not acknowledged."""
        self._samples: dict[str, dict[int, Group]] = {}
        """Samples of the groups that were delivered and wait to be trained."""
        self._restores: dict[int, int] | None = None

    def _add(self, part: Group) -> Group | None:
        id_, _, index = part.ticket_id.rpartition(".")
        ticket = self._tickets.get(id_)
        if ticket is not None and not _answers(part, ticket):
            self._store.withdraw([part.ticket_id])
            self._store.put_tickets([p for p in split(ticket) if p.id == part.ticket_id])
            return None
        if self._is_abandoned(part):  # its siblings may stay
            self._store.reissue([part.ticket_id])
            return None
        if id_ in self._complete:
            if int(index) not in self._complete[id_]:  # else it is read again after a connection break
                self._store.acknowledge([part.ticket_id])  # too late for the race
            return None
        parts = self._parts.setdefault(id_, {})
        parts[int(index)] = part
        if len(parts) < self._num_samples:
            return None
        del self._parts[id_]
        self._complete[id_], self._samples[id_] = frozenset(parts), parts
        if self._num_requests > self._num_samples:
            self._store.withdraw([f"{id_}.{i}" for i in range(self._num_requests) if i not in parts])
        return join(id_, [parts[i] for i in sorted(parts)])

    def _num_spare(self, id_: str) -> int:
        ticket = self._tickets.get(id_)
        return ticket.num_requests - self._num_samples if ticket is not None else 0

    def _is_abandoned(self, part: Group) -> bool:
        if self._restores is None:
            self._restores = self._store.restores()
        return part.is_abandoned(self._restores)

    def _ids(self, ticket_ids: Iterable[str]) -> list[str]:
        return [f"{id_}.{i}" for id_ in ticket_ids for i in range(self._num_requests)]

    def _forget(self, ticket_ids: Iterable[str]) -> None:
        for id_ in ticket_ids:
            self._parts.pop(id_, None)
            self._complete.pop(id_, None)
            self._samples.pop(id_, None)


def split(ticket: Ticket) -> list[Ticket]:
    """Returns the tickets of the single requests of a training ticket."""
    return [
        dataclasses.replace(ticket, id=f"{ticket.id}.{i}", num_samples=1, num_requests=1)
        for i in range(ticket.num_requests)
    ]


def _answers(part: Group, ticket: Ticket) -> bool:
    return np.array_equal(part.prompt_tokens, ticket.prompt_tokens)


def group_id(part_id: str) -> str:
    """Returns the id of a sample's group."""
    return part_id.rpartition(".")[0] or part_id


def join(id_: str, parts: Sequence[Group]) -> Group:
    """Returns the group that consists of several samples."""
    newest_of_parts = [Version(incarnation=p.incarnation, step=p.max_step) for p in parts]
    *older, newest = newest_of_each([*newest_of_parts, *(v for p in parts for v in p.older_versions)])
    return dataclasses.replace(
        parts[0],
        ticket_id=id_,
        rollouts=tuple(r for p in parts for r in p.rollouts),
        incarnation=newest.incarnation,
        older_versions=tuple(older),
        actor=parts[0].actor if len({p.actor for p in parts}) == 1 else "+".join(p.actor for p in parts),
        started_s=min(p.started_s for p in parts),
        finished_s=max(p.finished_s for p in parts),
    )
