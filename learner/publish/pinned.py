"""Evaluations and probes: groups sampled by exactly the weights now published.

An evaluation must be back before the next publish (the engine's weights would change under it), a
probe before the next optimizer step (the learner's would). Until then training goes on.
"""

import time
from collections.abc import Callable

import numpy as np
from absl import logging

from bridge.store.protocol import LearnerStore
from bridge.types import Group, Sampling, Ticket, Version
from learner.data.problems import Problem

PROBE_PROBLEMS = 2
PROBE_SAMPLES = 2
PROBE_TOKENS = 64
PINNED_POLL_S = 0.002
_FIRST_ORDER = {"probe": -2_000_000_000, "eval": -1_000_000_000}
"""Below every training ticket's, so that they are served first."""


class Pinned:
    """Tickets of one kind, out for one version at a time."""

    def __init__(self, kind: str, store: LearnerStore, *, while_waiting: Callable[[], None]) -> None:
        """Nothing is out; `while_waiting` is called on every poll and may raise."""
        self._kind = kind
        self._store = store
        self._while_waiting = while_waiting
        self._tickets: dict[str, Ticket] = {}
        self._groups: dict[str, Group] = {}
        self._after_seq = 0
        self.version: Version | None = None
        """The weights asked about; None when nothing is out."""

    def start(self, problems: list[tuple[Problem, int]], sampling: Sampling, *, version: Version, round: int) -> None:
        """Sends (problem, samples) pairs out.

        Raises:
          RuntimeError: the ones before were not settled.
        """
        if self.version is not None:
            raise RuntimeError(f"{self._kind} tickets of {self.version} are still out")
        tickets = pinned_tickets(self._kind, problems, sampling, version=version, round=round)
        self._store.put_tickets(tickets)
        self._tickets = {t.id: t for t in tickets}
        self._groups = {}
        self.version = version

    def settle(self, accept: Callable[[Group], bool] = lambda group: True) -> list[Group]:
        """Waits until all are back and returns them in order; what `accept` refuses is asked for again.

        A ticket that nobody could make a group for is left out.
        """
        while len(self._groups) < len(self._tickets):
            stored = self._store.read_groups(after_seq=self._after_seq, limit=256, kind=self._kind)
            if not stored:
                self._while_waiting()
                failed = self._store.failed()
                self._tickets = {i: t for i, t in self._tickets.items() if i not in failed}
                time.sleep(PINNED_POLL_S)
                continue
            for s in stored:
                self._after_seq = s.seq
                if s.group.ticket_id not in self._tickets or s.group.ticket_id in self._groups:
                    continue
                if not self._is_pinned(s.group) or not accept(s.group):
                    self._store.reissue([s.group.ticket_id])
                else:
                    self._groups[s.group.ticket_id] = s.group
        groups = sorted(self._groups.values(), key=lambda g: g.order)
        self._store.acknowledge([g.ticket_id for g in groups])
        self._tickets, self._groups, self.version = {}, {}, None
        return groups

    def _is_pinned(self, group: Group) -> bool:
        version = self.version
        if version is None:
            return False
        exact = (group.incarnation, group.min_step, group.max_step) == (
            version.incarnation,
            version.step,
            version.step,
        )
        if not exact:
            logging.warning(
                "pinned group of other weights ticket=%s steps=%d..%d wanted=%s",
                group.ticket_id,
                group.min_step,
                group.max_step,
                version,
            )
        return exact


def evaluation_metrics(groups: list[Group]) -> dict[str, float]:
    """The held-out reward of evaluation groups, all of one version."""
    rollouts = [r for g in groups for r in g.rollouts]
    return {
        "eval/reward": float(np.mean([r.reward for r in rollouts])),
        "eval/version": groups[0].max_step,
        "eval/response_tokens": float(np.mean([r.tokens.size for r in rollouts])),
    }


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
    return [
        Ticket(
            id=f"{kind}-{version}-{i:06d}",
            kind=kind,
            round=round,
            order=_FIRST_ORDER[kind] + i,
            prompt_tokens=problem.prompt_tokens,
            task=problem.task,
            num_samples=num_samples,
            num_requests=num_samples,
            sampling=sampling,
            min_version=version,
        )
        for i, (problem, num_samples) in enumerate(problems)
    ]
