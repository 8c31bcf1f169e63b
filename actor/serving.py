"""Serving of one ticket: redundant sampling, scoring, group building, handover, circuit breaker, timeline rows.

A ticket may have more requests than its group has samples: eta_R K requests for K samples. The first K that finish win
and form the group. The others have lost and are aborted, so a group never waits for its longest responses. A failed
request cannot win; the race continues while K requests still can. With K requests no request loses.
"""

import asyncio
import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import logging
from msgspec import UNSET

from actor.admission import Admission
from actor.circuit_breaker import CircuitBreaker
from actor.engine_protocol import AbortedError, Episode, PartialSample, Sample
from actor.environments.protocol import EpisodeError
from actor.handover import makers, progress_so_far
from actor.leases import Fence, Leases
from actor.notifier import Notifier
from actor.rewards.scorer import RewardResult, RewardScorer
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierError
from actor.sample_race import SampleRace
from actor.sampling import Sampler
from actor.teacher_servers import TeacherServers
from bridge.progress_types import RequestProgress, TicketProgress
from bridge.rollout_types import Group, Rollout, Ticket, Version, newest_of_each
from bridge.store.store_types import FencedError, UnfitGroupError
from bridge.timeline import Timeline

MAX_ATTEMPTS = 3
"""Attempts of a ticket whose responses cannot be scored. After the last one, another prompt replaces it."""
Member = tuple[Sample, RewardResult, Response | None]
"""Sample, its reward and its response. The response is None if nothing counts its thinking."""


def build_group(
    ticket: Ticket, members: Mapping[int, Member], *, actor: str, started_s: float, finished_s: float
) -> Group:
    """Returns the group of one attempt at a ticket, with rollouts in request order; `members` are by request index.

    `started_s` is the Unix time at which the first request entered the engine, `finished_s` that of the last reward or
    teacher logprob. Raises ValueError if there are not K members, or a reward is not finite.
    """
    if len(members) != ticket.num_samples:
        raise ValueError(f"ticket {ticket.id} has {len(members)} of {ticket.num_samples} samples")
    for index, (_, judged, _) in members.items():
        if not math.isfinite(judged.reward):
            raise ValueError(f"ticket {ticket.id}: sample {index} has reward {judged.reward}")
    *older, newest = newest_of_each(v for sample, _, _ in members.values() for v in _ends_of_incarnations(sample))
    return Group(
        ticket_id=ticket.id,
        kind=ticket.kind,
        round=ticket.round,
        order=ticket.order,
        prompt_tokens=ticket.prompt_tokens,
        rollouts=tuple(_rollout(*members[index], is_trained=ticket.kind != "eval") for index in sorted(members)),
        incarnation=newest.incarnation,
        older_versions=tuple(older),
        actor=actor,
        started_s=started_s,
        finished_s=finished_s,
    )


def _ends_of_incarnations(sample: Sample) -> Sequence[Version]:
    """Returns versions of a sample that include the last of each incarnation; they never decrease within a sample."""
    versions = sample.token_versions
    is_mixed = versions[0].incarnation != versions[-1].incarnation
    return versions if is_mixed else versions[-1:]


def _rollout(sample: Sample, judged: RewardResult, response: Response | None, *, is_trained: bool) -> Rollout:
    """Returns a rollout, without its routing unless the learner computes its logprobs (training, probes)."""
    episode = sample.episode or Episode(
        sampled=np.ones(sample.tokens.size, np.bool_), turn_rewards=np.zeros(0, np.float32)
    )
    return Rollout(
        tokens=sample.tokens,
        loss_mask=episode.sampled,
        behavior_logprobs=sample.logprobs,
        token_versions=np.asarray([v.step for v in sample.token_versions], np.int32),
        finish=sample.finish,
        reward=judged.reward + float(episode.turn_rewards.sum(dtype=np.float64)),
        scores=judged.scores,
        turn_rewards=episode.turn_rewards,
        num_thinking_tokens=response.num_thinking_tokens if response is not None else 0,
        is_thinking_finished=response is None or response.is_thinking_finished,
        routed_experts=sample.routed_experts if is_trained else UNSET,
        teacher_logprobs=sample.teacher_logprobs,
    )


class TimelineRows:
    """Allocator of timeline row numbers from 1 (0 is the process's own row); the lowest free number first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._unused = itertools.count(1)

    def take(self) -> int:
        """Returns the lowest free row."""
        return heapq.heappop(self._free) if self._free else next(self._unused)

    def give_back(self, lane: int) -> None:
        """Frees a row."""
        heapq.heappush(self._free, lane)


def record(timeline: Timeline, group: Group, *, lane: int, served_s: float) -> None:
    """Records a group's rollout span, until `served_s` (Unix time of its last finish), and its reward span."""
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


@dataclasses.dataclass(slots=True)
class ServingStats:
    """Cumulative counts of served tickets."""

    num_emitted: int = 0
    num_submitted_tokens: int = 0
    """Own response tokens of submitted groups and of progress. All others were discarded (races, restarts)."""
    num_dropped: int = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class TicketServer:
    """Server of any number of concurrent tickets."""

    actor: str
    """Name of the actor, recorded in its groups."""
    sampler: Sampler
    rewards: RewardScorer
    teachers: TeacherServers
    read: Callable[[Ticket, Sample], Response]
    """Converts a sample to the response that verifiers receive."""
    admission: Admission
    holdings: Leases
    fence: Fence
    timeline: Timeline
    max_attempts: int
    changed: Notifier
    """Notified when another ticket may fit into the engine."""
    sample_ended: Notifier

    def __post_init__(self) -> None:
        self.tally = ServingStats()
        self._just_served: list[str] = []
        self._outage = CircuitBreaker()
        self._lanes = TimelineRows()

    @property
    def has_unreported_tickets(self) -> bool:
        """True if `pop_finished_tickets` has tickets that hold places of a frontier."""
        return self.admission.policy == "frontier" and bool(self._just_served)

    def pop_finished_tickets(self) -> list[str]:
        """Returns tickets whose last request finished since the last call; the store removes them from the frontier."""
        served, self._just_served = self._just_served, []
        return served

    async def serve(self, ticket: Ticket) -> None:
        """Samples, scores and submits the group of a ticket, or hands it over; only race winners are scored.

        Raises an ExceptionGroup of failures not caused by the ticket (EngineDeadError, FencedError, StoreLostError),
        and RuntimeError if scoring fails permanently.
        """
        self.rewards.begin(ticket.task)
        start_s = served_s = time.time()
        unix_s = start_s - time.monotonic()
        begun = self.sampler.usable(ticket)
        actors = makers(ticket if begun else None, self.actor)
        finished: dict[int, Sample] = {}
        judged: dict[int, RewardResult] = {}
        members: dict[int, Member] = {}
        stopped: dict[int, PartialSample] = {}
        race = SampleRace(num_samples=ticket.num_samples, num_requests=ticket.num_requests)
        requests: list[asyncio.Task[None]] = []

        async def serve_sample(index: int) -> None:
            nonlocal served_s
            try:
                sample = finished[index] = await self.sampler.sample(ticket, index, begun.get(index))
            except AbortedError as e:
                if not self.sampler.is_stopped(ticket.id):
                    raise
                if e.partial is not None:
                    stopped[index] = e.partial
                race.stop(index)
                end_scoring()
                return
            except EpisodeError as e:
                if not race.fail(index):
                    raise
                logging.warning("redundant episode lost ticket=%s sample=%d problem=%r", ticket.id, index, str(e))
                self._request_ended(ticket, 1)
                return
            served_s = unix_s + time.monotonic()
            losers = race.finish(index)
            for loser in losers:
                requests[loser].cancel()
            self._request_ended(ticket, 1 + len(losers))
            response, done = self.read(ticket, sample), begun.get(index)
            if done is not None and done.reward is not None:
                judged[index] = RewardResult(reward=done.reward, scores=done.scores)
            elif not race.is_stopped:
                judged[index] = await self.rewards.score(response, ticket.task)
            if race.is_stopped:
                end_scoring()
            else:
                members[index] = (await self.teachers.score(ticket, sample), judged[index], response)

        def end_scoring() -> None:
            if race.is_stopped:  # the next actor scores the others, and asks the teachers again
                for index in finished.keys() - members.keys():
                    requests[index].cancel()

        lane, is_recorded = self._lanes.take(), False
        # Write a begin event, because a span is only written at its end, which a hang never reaches.
        about = {"ticket": ticket.id, "kind": ticket.kind, "round": ticket.round, "order": ticket.order}
        self.timeline.instant("begin", time_s=start_s, lane=lane, **about)
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(ticket.num_requests):
                    requests.append(samples.create_task(serve_sample(index)))
            if race.is_stopped:
                await self._hand_over(ticket, progress_so_far(ticket, actors, finished, judged, stopped), begun)
                return
            group = build_group(
                ticket, members, actor="&".join(actors), started_s=start_s, finished_s=unix_s + time.monotonic()
            )
            await self._submit(group, num_received=sum(begun[i].tokens.size for i in members if i in begun))
            record(self.timeline, group, lane=lane, served_s=served_s)
            is_recorded = True
        except* (VerifierError, EpisodeError) as e:
            await self._drop(ticket, e.exceptions[0])
        finally:
            self.sampler.forget(ticket.id)
            if not is_recorded:
                self.timeline.instant("aborted", lane=lane, ticket=ticket.id)
            self._lanes.give_back(lane)

    async def hand_over(self) -> None:
        """Stops sampling of training tickets without episodes; incomplete groups are released with their samples."""
        for ticket in self.admission.in_service:
            if ticket.kind == "train" and not ticket.task.environment:
                await self.sampler.stop(ticket.id)

    async def _hand_over(
        self, ticket: Ticket, progress: TicketProgress | None, begun: Mapping[int, RequestProgress]
    ) -> None:
        num_tokens = 0 if progress is None else progress.num_tokens
        if progress is None:
            await self.holdings.release([ticket.id])
        else:
            await self.holdings.hand_over(progress)
            num_received = sum(begun[r.index].tokens.size for r in progress.requests if r.index in begun)
            self.tally.num_submitted_tokens += num_tokens - num_received
        logging.info("ticket handed over ticket=%s tokens=%d", ticket.id, num_tokens)
        self.timeline.instant("handed over", ticket=ticket.id, tokens=num_tokens)

    def _request_ended(self, ticket: Ticket, num_requests: int) -> None:
        if self.admission.finish_sample(ticket.id, num_requests):
            self._just_served.append(ticket.id)
        self.changed.notify()
        self.sample_ended.notify()

    async def _submit(self, group: Group, *, num_received: int) -> None:
        """Submits a group; `num_received` of its tokens are other actors'."""
        try:
            is_new = await self.holdings.submit(group)
        except (KeyError, UnfitGroupError) as e:  # withdrawn, or reissued with another prompt
            logging.info("group rejected ticket=%s reason=%s", group.ticket_id, e)
            return
        except FencedError:
            await self.fence.check()
            await self.holdings.release([group.ticket_id])  # an actor that it continues may be the fenced one
            return
        self.tally.num_emitted += is_new
        num_tokens = sum(int(r.loss_mask.sum()) for r in group.rollouts) - num_received
        self.tally.num_submitted_tokens += is_new * num_tokens
        self._outage.record_success()

    async def _drop(self, ticket: Ticket, reason: BaseException) -> None:
        """Fails the ticket of a group that cannot be scored; it is offered again, up to `max_attempts` attempts."""
        self.tally.num_dropped += 1
        self.timeline.instant("dropped", ticket=ticket.id, reason=str(reason))
        logging.error("group dropped ticket=%s reason=%s", ticket.id, reason)
        if self._outage.record_failure(ticket):
            raise RuntimeError(f"{self._outage} could not be scored: {reason}")
        is_final = isinstance(reason, EpisodeError) and reason.is_final
        await self.holdings.fail(ticket, str(reason), max_attempts=1 if is_final else self.max_attempts)
