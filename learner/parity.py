"""Parity check of engine and learner logprobs after a publish, the parity fence, and re-admission.

Wrong weights in an engine raise no error and change only the importance ratios (docs/design/weight_verification.md).
After a publish the learner samples a few responses and computes their logprobs with the published weights. An actor
whose logprobs differ by more than the tolerance is fenced.

A fenced actor discards its samples, fetches the published version in full and answers a probe (`actor.weight_updates`).
It is re-admitted if all its answers are within the tolerance. After `MAX_TRIES` failed probes it is fenced permanently
and exits; a new process under its name is not served. The operator can grant it `MAX_TRIES` more with
`launch.tools.runs --unfence`.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np
from absl import logging
from jaxtyping import Float32

from bridge.rollout_types import Group, Sampling, Ticket, Version
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import PERMANENT
from configs.sections import LossConfig, PackingConfig
from learner.data.problem import Problem
from learner.evaluation.pinned_requests import PinnedRequests, pinned_tickets
from learner.heartbeat import live_actors
from learner.model.routing_replay import RoutingShape
from learner.update.packing import PackedBatch, pack_groups

_ANY_LOSS = LossConfig()
"""Loss config that packing requires; the parity check does not read the loss weights."""


ScoreFunction = Callable[[PackedBatch], Float32[np.ndarray, "B S"]]
"""Function that returns log pi of a batch's trained tokens by the learner's current weights, in nats."""


def max_abs_dlogprob(
    score: ScoreFunction, group: Group, packing: PackingConfig, routing: RoutingShape | None = None
) -> float:
    """Returns the largest |log pi - log mu| over a group's sampled tokens, in nats, by weights of its version."""
    worst = 0.0
    for micro in pack_groups([group], packing=packing, loss=_ANY_LOSS, max_response_tokens=1, routing=routing):
        logprobs = score(micro.batch)
        off = np.abs(logprobs - micro.batch.behavior_logprobs)[np.asarray(micro.batch.loss_mask)]
        worst = float(np.maximum(worst, off.max(initial=0.0)))  # np.maximum keeps NaN, which exceeds every tolerance
    return worst


def settle(
    probe: PinnedRequests,
    *,
    score: ScoreFunction,
    packing: PackingConfig,
    routing: RoutingShape | None = None,
    bound: float,
    fence: Callable[[str, str, float], None],
    before_score: Callable[[], None] = lambda: None,
) -> float:
    """Waits for the probe; returns the largest |log pi - log mu| of passing actors in nats, NaN if none passes.

    Fences each actor over `bound` (nats): `fence` gets the actor, the reason and the difference. Other actors
    regenerate its groups. `score` must use the published weights. `before_score` is called before each forward pass,
    which may have to compile.
    """
    worst = 0.0

    def accept(group: Group, ticket: Ticket) -> bool:
        nonlocal worst
        del ticket
        before_score()
        off = max_abs_dlogprob(score, group, packing, routing)
        if off <= bound:
            worst = max(worst, off)
            return True
        reason = f"its logprobs are off by {off:.3g} nats at version {probe.version}, the bound is {bound:.3g}"
        fence(group.actor, reason, off)
        return False

    return worst if probe.wait(accept) else float("nan")


MAX_TRIES = 3
LOOK_AT_BEATS_S = 2.0
ALONE_S = 30.0
"""Seconds without a possible probe or another live actor after which fenced actors are banned and exit."""


class Gate(Protocol):
    """Fenced actors of the run, and methods to change them (`learner.schedule.rollout_stream.RolloutStream`)."""

    @property
    def fenced_actors(self) -> Collection[str]:
        """Names of the fenced actors."""
        ...

    @property
    def round(self) -> int:
        """Round being trained."""
        ...

    def fence(self, actor: str, reason: str, off_nats: float | None = None) -> None:
        """Rejects an actor's groups and claims."""
        ...

    def unfence(self, actor: str) -> None:
        """Re-admits an actor."""
        ...

    def is_sound(self, group: Group, ticket: Ticket) -> bool:
        """Returns True if a group is consistent with the run and its ticket."""
        ...


@dataclasses.dataclass
class _Probe:
    version: Version
    tickets: dict[str, Ticket]
    """Tickets not answered yet."""
    ids: tuple[str, ...]


class ParityFence:
    """Re-admission of fenced actors: pending probes and their results."""

    def __init__(
        self,
        store: LearnerStore,
        gate: Gate,
        *,
        problems: list[tuple[Problem, int]],
        sampling: Sampling,
        published: Callable[[], Version | None],
        score: Callable[[Group], float],
        bound: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without pending probes.

        `problems` holds the (problem, samples) pairs of a probe; if it is empty, no actor is re-admitted. `published`
        returns the last announced version if the learner still has its weights, else None. `score` returns a group's
        largest |log pi - log mu|, and `bound` is its tolerance, both in nats.
        """
        self._store, self._gate = store, gate
        self._problems, self._sampling = problems, sampling
        self._published, self._score, self._bound, self._clock = published, score, bound, clock
        self._out: dict[str, _Probe] = {}
        self._num_tries: dict[str, int] = {}
        self._after_seq = 0
        self._num_breaks = store.num_breaks
        self._alive: set[str] = set()
        self._looked_at, self._could_probe_at = -float("inf"), clock()
        self._fenced: set[str] = set()
        """Actors fenced, but not permanently, at the last poll."""
        self._for_good: set[str] = set()

    def poll(self) -> None:
        """Offers probes to live fenced actors and checks their answers; never blocks."""
        if not self._gate.fenced_actors:
            self._fenced = set()
            return
        version, now = self._published(), self._clock()
        if now - self._looked_at >= LOOK_AT_BEATS_S:
            self._looked_at = now
            self._alive = {b.process for b in live_actors(self._store)}
            self._look_at_reasons()
        fenced = set(self._gate.fenced_actors) - self._for_good
        new, self._fenced = fenced - self._fenced, fenced
        if not fenced:
            return
        # A newly fenced actor gets the full ALONE_S: the last poll may have been long ago.
        if new or version is not None or self._alive - set(self._gate.fenced_actors) or not self._alive & fenced:
            self._could_probe_at = now
        for actor in [a for a, probe in self._out.items() if probe.version != version]:
            self._withdraw(actor)  # the learner no longer has that version's weights
        if version is not None and self._problems:
            for actor in sorted(fenced & self._alive - self._out.keys()):
                self._offer(actor, version)
            self._take_in()
        elif not self._problems or now - self._could_probe_at > ALONE_S:
            why = "there are no problems to probe it with" if not self._problems else "nobody else serves"
            for actor in sorted(fenced & self._alive):
                self.ban(actor, f"{why}, so it can't be proved clean", None)

    def ban(self, actor: str, reason: str, off: float | None = None) -> None:
        """Fences an actor permanently: it gets no more probes and exits; `off` is its logprob difference in nats."""
        self._for_good.add(actor)
        self._gate.fence(actor, f"{PERMANENT}{reason}", off)

    def _look_at_reasons(self) -> None:
        """Detects live, permanently fenced actors that the operator put on probation."""
        for actor in sorted(self._alive & set(self._gate.fenced_actors)):
            if (self._store.fenced(actor) or "").startswith(PERMANENT):
                self._for_good.add(actor)
            elif actor in self._for_good:
                self._for_good.discard(actor)
                self._num_tries.pop(actor, None)
                logging.warning("permanent fence changed to probation actor=%s", actor)

    def _offer(self, actor: str, version: Version) -> None:
        number = self._num_tries.get(actor, 0) + 1
        tickets = {
            id_: dataclasses.replace(ticket, id=id_)
            for i, ticket in enumerate(
                pinned_tickets("probe", self._problems, self._sampling, version=version, round=self._gate.round)
            )
            for id_ in [f"readmit-{actor}-{version}-{number}-{i}"]
        }
        self._store.put_tickets(tickets.values(), only_for=actor)
        self._out[actor] = _Probe(version, tickets, tuple(tickets))
        logging.info("probe issued to fenced actor actor=%s version=%s try=%d", actor, version, number)

    def _take_in(self) -> None:
        if self._num_breaks != (num_breaks := self._store.num_breaks):
            self._num_breaks = num_breaks
            for actor, probe in self._out.items():
                self._store.put_tickets(probe.tickets.values(), only_for=actor)  # the store may have lost them
        while stored := self._store.read_groups(after_seq=self._after_seq, limit=64, kind="probe"):
            for s in stored:
                self._after_seq = s.seq
                for actor, probe in list(self._out.items()):
                    if ticket := probe.tickets.pop(s.group.ticket_id, None):
                        self._judge(actor, probe, s.group, ticket)

    def _judge(self, actor: str, probe: _Probe, group: Group, ticket: Ticket) -> None:
        at, version = (group.incarnation, group.min_step, group.max_step), probe.version
        if at != (version.incarnation, version.step, version.step):
            # the actor served another version: offer the probe again
            return self._withdraw(actor)
        off = self._score(group) if self._gate.is_sound(group, ticket) else float("nan")
        if not off <= self._bound:
            return self._refuse(actor, version, off)
        if probe.tickets:
            return None
        self._withdraw(actor)
        self._num_tries.pop(actor, None)
        logging.info("fence lifted actor=%s version=%s off=%.3g", actor, version, off)
        return self._gate.unfence(actor)

    def _refuse(self, actor: str, version: Version, off: float) -> None:
        self._withdraw(actor)
        number = self._num_tries[actor] = self._num_tries.get(actor, 0) + 1
        reason = (
            f"its logprobs are off by {off:.3g} nats at version {version}, the bound is {self._bound:.3g} "
            f"(probe {number} of {MAX_TRIES})"
        )
        if number < MAX_TRIES:
            self._gate.fence(actor, reason, off)
        else:
            self.ban(actor, reason, off)

    def _withdraw(self, actor: str) -> None:
        probe = self._out.pop(actor, None)
        if probe is not None:
            self._store.withdraw(probe.ids)


MAX_LOST_IN_A_ROW = 8
"""Consecutive missing groups of one actor in the bucket until the actor is fenced."""


class LostGroupsFence:
    """Permanent fence for actors whose large groups never reach the bucket; their tickets go to other actors."""

    def __init__(self, store: LearnerStore, *, bucket: str, keep_out: Callable[[str, str], None]) -> None:
        self._store, self._bucket, self._keep_out = store, bucket, keep_out

    def look(self) -> None:
        """Fences actors over the limit; called while the learner waits and between micro-batches."""
        for actor, num in list(self._store.lost_in_a_row.items()):
            if num >= MAX_LOST_IN_A_ROW:
                del self._store.lost_in_a_row[actor]
                self._keep_out(
                    actor,
                    f"none of its last {num} large groups is in {self._bucket or 'a bucket, and the run has none'}; "
                    "give its machine and the learner's one store.bucket (s3://, gs://, a shared folder), and start it "
                    "again under another name",
                )
