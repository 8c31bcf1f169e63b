"""One ticket, from its requests in the engine to its group in the store."""

import asyncio
import dataclasses
import time
from collections.abc import Callable

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.admission import Admission
from actor.bell import Bell
from actor.environments.protocol import EpisodeError
from actor.fence import Fence
from actor.group_builder import GroupBuilder
from actor.holdings import Holdings
from actor.lanes import Lanes, begin, cut_off, record
from actor.outage import Outage
from actor.race import Race
from actor.rewards.scheduler import Rewards
from actor.sampling import Sampler
from actor.verifiers.judged import Response
from actor.verifiers.pool import VerifierError
from bridge.store.protocol import FencedError, UnfitGroupError
from bridge.timeline import Timeline
from bridge.types import Group, Ticket


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of tickets so far."""

    num_emitted: int = 0
    num_emitted_tokens: int = 0
    """Response tokens of emitted groups; what the engine sampled besides went to waste (races, restarts)."""
    num_dropped: int = 0
    """Groups that could not be judged."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Serving:
    """Serves any number of tickets at once."""

    actor: str
    """The actor's name, which its groups bear."""
    sampler: Sampler
    rewards: Rewards
    decode: Callable[[Int32[np.ndarray, " T"]], str]
    admission: Admission
    holdings: Holdings
    fence: Fence
    timeline: Timeline
    max_attempts: int
    changed: Bell
    """Rung when a ticket more may fit into the engine."""
    sample_ended: Bell
    """Rung when a request has ended."""

    def __post_init__(self) -> None:
        self.tally = Tally()
        self._just_served: list[str] = []
        self._outage = Outage()
        self._lanes = Lanes()

    def take_just_served(self) -> list[str]:
        """Tickets whose last request ended since the last call: the store counts them in the frontier no more."""
        served, self._just_served = self._just_served, []
        return served

    async def serve(self, ticket: Ticket) -> None:
        """Samples, judges and hands in; of redundant samples those count that win the race.

        Raises:
          ExceptionGroup: of what is no fault of the ticket's (EngineDeadError, FencedError for good, StoreLostError).
          RuntimeError: nothing can be judged any more.
        """
        self.rewards.begin(ticket.task)
        start_s = served_s = time.time()
        builder = GroupBuilder(ticket, actor=self.actor, started_s=start_s)
        race = Race(num_samples=ticket.num_samples, num_requests=ticket.num_requests)
        requests: list[asyncio.Task[None]] = []

        async def serve_sample(index: int) -> None:
            nonlocal served_s
            try:
                sample = await self.sampler.sample(ticket, index)
            except EpisodeError as e:
                if not race.fail(index):
                    raise
                logging.warning("redundant episode lost ticket=%s sample=%d problem=%r", ticket.id, index, str(e))
                self._book_ended(ticket, 1)
                return
            served_s = time.time()
            losers = race.end(index)
            for loser in losers:
                requests[loser].cancel()
            self._book_ended(ticket, 1 + len(losers))
            response = Response(text=self.decode(sample.last_turn), finish=sample.finish, num_tokens=sample.num_sampled)
            builder.add(index, sample, await self.rewards.judge(response, ticket.task))

        lane, is_recorded = self._lanes.take(), False
        begin(self.timeline, ticket, lane=lane, time_s=start_s)
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(ticket.num_requests):
                    requests.append(samples.create_task(serve_sample(index)))
            group = builder.build(finished_s=time.time())
            await self._emit(group)
            record(self.timeline, group, lane=lane, served_s=served_s)
            is_recorded = True
        except* (VerifierError, EpisodeError) as e:
            await self._drop(ticket, e.exceptions[0])
        finally:
            self.sampler.forget(ticket.id)
            if not is_recorded:
                cut_off(self.timeline, ticket, lane=lane)
            self._lanes.give_back(lane)

    def _book_ended(self, ticket: Ticket, num_requests: int) -> None:
        if self.admission.finish_sample(ticket.id, num_requests):
            self._just_served.append(ticket.id)
        self.changed.ring()
        self.sample_ended.ring()

    async def _emit(self, group: Group) -> None:
        try:
            is_new = await self.holdings.hand_in(group)
        except (KeyError, UnfitGroupError) as e:  # withdrawn, or another prompt has its id now
            logging.info("group unwanted ticket=%s: %s", group.ticket_id, e)
            return
        except FencedError:
            await self.fence.look()
            return
        self.tally.num_emitted += is_new
        self.tally.num_emitted_tokens += is_new * sum(int(r.loss_mask.sum()) for r in group.rollouts)
        self._outage.ended()

    async def _drop(self, ticket: Ticket, reason: BaseException) -> None:
        """Gives up a group that can't be judged; its ticket is offered again, a bounded number of times.

        An episode that would fail alike each time, as one whose first observation leaves no room, fails it at once.
        """
        self.tally.num_dropped += 1
        self.timeline.instant("dropped", ticket=ticket.id, reason=str(reason))
        logging.error("group dropped ticket=%s reason=%s", ticket.id, reason)
        if self._outage.is_for_good(ticket):
            raise RuntimeError(f"{self._outage} could not be judged: {reason}")
        is_final = isinstance(reason, EpisodeError) and reason.is_final
        await self.holdings.give_up(ticket, str(reason), max_attempts=1 if is_final else self.max_attempts)
