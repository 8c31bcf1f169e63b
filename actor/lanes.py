"""A group's entries in the event log, each group in progress in a row of its own: spans of one row must not overlap."""

import heapq
import itertools

import numpy as np

from bridge.timeline import Timeline
from bridge.types import Group, Ticket


class Lanes:
    """Numbers of rows from 1 (0 is the process's own), as low as possible, and as many as are asked for."""

    def __init__(self) -> None:
        """All are free."""
        self._free: list[int] = []
        self._unused = itertools.count(1)

    def take(self) -> int:
        """The lowest free one."""
        return heapq.heappop(self._free) if self._free else next(self._unused)

    def give_back(self, lane: int) -> None:
        """Frees one that was taken."""
        heapq.heappush(self._free, lane)


def begin(timeline: Timeline, ticket: Ticket, *, lane: int, time_s: float) -> None:
    """Records that a ticket is begun (Unix seconds): a span is written when it ends, which a hang never does."""
    about = {"ticket": ticket.id, "kind": ticket.kind, "round": ticket.round, "order": ticket.order}
    timeline.instant("begin", time_s=time_s, lane=lane, **about)


def cut_off(timeline: Timeline, ticket: Ticket, *, lane: int) -> None:
    """Records that a ticket that was begun is served no more, and has no group of this process."""
    timeline.instant("cut off", lane=lane, ticket=ticket.id)


def record(timeline: Timeline, group: Group, *, lane: int, served_s: float) -> None:
    """Records a group's rollout, up to `served_s` (Unix seconds; its last sample ended), and its reward."""
    about = {"ticket": group.ticket_id, "kind": group.kind, "round": group.round, "order": group.order}
    timeline.span(
        "rollout",
        group.started_s,
        served_s,
        lane=lane,
        tokens=sum(r.tokens.size for r in group.rollouts),
        min_step=group.min_step,
        max_step=group.max_step,
        **about,
    )
    mean = float(np.mean([r.reward for r in group.rollouts]))
    timeline.span("reward", served_s, group.finished_s, lane=lane, reward=mean, **about)
