"""Problems to groups: each sampled by the engine and judged, as an actor does it, without a store."""

import asyncio
import time
from collections.abc import Callable, Sequence

from absl import logging

from actor.engine.protocol import Sample
from actor.environments.protocol import EpisodeError
from actor.group_builder import GroupBuilder
from actor.rewards.scheduler import Rewards
from actor.sampling import Sampler
from actor.verifiers.judged import Response
from actor.verifiers.pool import VerifierError
from bridge.types import Group, Sampling, Ticket, Version
from learner.data.sets import ProblemSet
from learner.publish.pinned import pinned_tickets

ACTOR = "evaluation"


class Runner:
    """Serves tickets, as many samples at once as there are places."""

    def __init__(
        self,
        sampler: Sampler,
        rewards: Rewards,
        *,
        read: Callable[[Ticket, Sample], Response],
        places: int,
        max_attempts: int,
    ) -> None:
        """Nothing runs; a ticket whose responses can't be judged is tried `max_attempts` times."""
        self._sampler, self._rewards, self._read = sampler, rewards, read
        self._places = asyncio.Semaphore(places)
        self._num_at_once = places + 1
        """Tickets begun at a time: enough for the places, though each had one sample."""
        self._max_attempts = max_attempts

    async def run(self, tickets: Sequence[Ticket], *, done: Callable[[Ticket, Group | None], None]) -> list[Group]:
        """The groups of all tickets, in their order; of some there may be none.

        `done` hears of each as it ends, with its group, or without where nobody could make one.

        Raises:
          ExceptionGroup: of what is no fault of a ticket's (EngineDeadError).
        """
        waiting = iter(tickets)
        groups: dict[str, Group] = {}

        async def work() -> None:
            for ticket in waiting:
                group = await self._serve(ticket)
                if group is not None:
                    groups[ticket.id] = group
                done(ticket, group)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._num_at_once, len(tickets))):
                workers.create_task(work())
        return [groups[t.id] for t in tickets if t.id in groups]

    async def _serve(self, ticket: Ticket) -> Group | None:
        for attempt in range(self._max_attempts):
            try:
                return await self._attempt(ticket)
            except* (VerifierError, EpisodeError) as e:
                error = e.exceptions[0]
                logging.error("problem not judged ticket=%s attempt=%d reason=%s", ticket.id, attempt, error)
            if isinstance(error, EpisodeError) and error.is_final:
                break
        return None

    async def _attempt(self, ticket: Ticket) -> Group:
        started_s, started = time.time(), time.monotonic()
        builder = GroupBuilder(ticket, actor=ACTOR, started_s=started_s)

        async def sample(index: int) -> None:
            async with self._places:
                made = await self._sampler.sample(ticket, index)
            response = self._read(ticket, made)
            builder.add(index, made, await self._rewards.judge(response, ticket.task), response)

        async with asyncio.TaskGroup() as samples:
            for index in range(ticket.num_samples):
                samples.create_task(sample(index))
        return builder.build(finished_s=started_s + time.monotonic() - started)


def tickets_of(one: ProblemSet, *, version: Version, stop_token_ids: tuple[int, ...], place: int) -> list[Ticket]:
    """What is asked of a set; `place` is the set's among all of them."""
    how = one.how
    sampling = Sampling(
        max_tokens=how.max_tokens,
        temperature=how.temperature or 0.0,
        top_p=1.0 if how.top_p is None else how.top_p,
        stop_token_ids=stop_token_ids,
    )
    problems = [(p, how.k) for p in one.problems]
    return pinned_tickets("eval", problems, sampling, version=version, round=0, name=one.name, place=place)


def leaves(error: BaseException) -> list[str]:
    """What an error says; of a group what each of its errors says."""
    if isinstance(error, BaseExceptionGroup):
        return [said for one in error.exceptions for said in leaves(one)]
    return [str(error) or type(error).__name__]
