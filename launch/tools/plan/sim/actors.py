"""Actors' serving over the real admission code."""

import collections
import heapq
import math
from collections.abc import Callable

import numpy as np

from bridge.rollout_types import Ticket, Version
from configs.schema import Config
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.episodes import SimEpisodes
from launch.tools.plan.sim.event_queue import EventQueue
from launch.tools.plan.sim.fleet import Fleet, ServedGroup, SimActor, SimGroup, Totals, served
from launch.tools.plan.sim.sim_engine import FinishedRequest
from launch.tools.plan.sim.tickets import TicketPool, group_id
from launch.tools.plan.workload import Lengths
from learner.schedule.scale_down_criteria import SHARE, ScaleDown, would_fit


class LeastLoadedQueue:
    """Queue of actors with room for more tickets than they last claimed, by number of leased tickets."""

    def __init__(self, pool: TicketPool) -> None:
        self._pool = pool
        self._queue: list[tuple[int, int, SimActor]] = []
        """Heap; outdated entries are skipped."""

    def note(self, actor: SimActor) -> None:
        """Queues an actor that has room for more than it claimed."""
        entry = (self._pool.num_held(actor.index), actor.index, actor)
        if actor.hunger != entry[0]:
            actor.hunger = entry[0]
            heapq.heappush(self._queue, entry)

    def next(self) -> SimActor | None:
        """Returns an actor that can get tickets from the pool; None if there is none."""
        while self._queue and self._pool.has_offer:
            num_held, _, actor = self._queue[0]
            is_current = num_held == actor.hunger and num_held == self._pool.num_held(actor.index)
            if is_current and self._pool.share_of(actor.index) == 0:
                return None  # it has the fewest tickets, so every actor with room has its share
            heapq.heappop(self._queue)
            if num_held == actor.hunger:
                actor.hunger = -1
                return actor
        return None


NUM_RECENT = 1024
"""Number of recent response lengths kept, as in `actor/vllm/convert.py`."""


class SimActors:
    """All simulated engines with their actors."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        lengths: Lengths,
        calendar: EventQueue,
        on_group: Callable[[ServedGroup], None],
        *,
        on_claim: Callable[[], None] = lambda: None,
        on_free_chips: Callable[[], None] = lambda: None,
        pays: Callable[[int], bool] = lambda num_chips: True,
        seed: int = 0,
    ) -> None:
        """Starts idle, with weights of step 0.

        Args:
          on_free_chips: called when `num_free_chips` increases, for a learner without its own chips, or with helpers.
          pays: called with a number of chips; returns True if the round ends sooner if engines release them now.
        """
        self._config, self._profile, self._lengths = config, profile, lengths
        self._calendar, self._on_group = calendar, on_group
        self._on_claim, self._on_free_chips, self._pays = on_claim, on_free_chips, pays
        self._shares_chips = profile.num_learner_chips == 0 or profile.helpers is not None
        self._start_s = 0.0 if profile.helpers is None else profile.helpers.start_s
        self._released_s = self._over_s = math.inf
        """Times from which released engines, and all engines after the round's rollout, can train."""
        self._gives_up = self._shares_chips and config.rounds.train_start == "group_ready"
        self._scale_down = ScaleDown()
        self._recent_lengths: collections.deque[tuple[int, int]] = collections.deque(maxlen=NUM_RECENT)
        """Prompt and response tokens of the last finished requests."""
        self._lag_bound = config.max_lag_steps if config.publish.when == "every" else None
        by_sample = config.admission.unit == "sample"
        policy = config.admission.policy
        self._pool = TicketPool(
            num_engines=profile.num_engines,
            width=config.admission_width if policy == "frontier" else None,
            by_sample=by_sample,
            shares=policy != "window",
        )

        self._fleet = Fleet(config, profile, calendar, self._settle)
        self._episodes = profile.episodes and SimEpisodes(
            config, profile.episodes, lengths, calendar, self._fleet, self._settle, seed=seed
        )
        self._hunger = LeastLoadedQueue(self._pool)
        for actor in self._fleet.actors:
            self._hunger.note(actor)
        self._groups: dict[str, SimGroup] = {}
        self._by_request: dict[str, SimGroup] = {}
        self._complete: dict[str, SimGroup] = {}
        """Complete groups that are not trained yet."""
        self._num_coming = 0
        """Number of issued tickets that are not in the pool yet."""
        self._claim_is_told = False

    def offer(self, tickets: list[Ticket], *, attempt: int = 0) -> None:
        """Issues tickets, whose answer is the problem number; withdraws earlier tickets of the same ids."""
        if not tickets:
            return
        self.withdraw([t.id for t in tickets])
        if not self._groups:
            self._take_back()
        self._scale_down.num_requests += sum(t.num_requests for t in tickets)
        groups = []
        for ticket in tickets:
            problem = int(ticket.task.answer)
            lengths = self._lengths.responses(problem, ticket.num_requests, attempt=attempt)
            groups.append(SimGroup(ticket, self._lengths.prompt(problem), lengths, attempt))
        self._offer(groups)

    def offer_again(self, ticket: Ticket, *, attempt: int, older_than: int | None) -> None:
        """Reissues a complete group; for single-sample tickets, only samples begun before step `older_than`."""
        group = self._complete.pop(ticket.id, None)
        finished = [] if group is None or older_than is None else group.finished
        kept = [f for f in finished if older_than is not None and f.spans[0][0] >= older_than]
        if group is None or not kept or self._config.admission.unit == "group":
            self.offer([ticket], attempt=attempt)
            return
        lengths = self._lengths.responses(int(ticket.task.answer), ticket.num_samples - len(kept), attempt=attempt)
        self._offer([SimGroup(ticket, group.prompt_tokens, lengths, attempt, finished=kept, engines=group.engines)])

    def acknowledge(self, ticket_id: str) -> None:
        """Marks a group as trained."""
        self._complete.pop(ticket_id, None)

    @property
    def num_unclaimed(self) -> int:
        """Number of groups whose tickets are not claimed."""
        per_group = self._config.rounds.requests_per_group if self._config.admission.unit == "sample" else 1
        return self._num_coming + -(-self._pool.num_open // per_group)

    def _offer(self, groups: list[SimGroup]) -> None:
        self._groups |= {g.ticket.id: g for g in groups}
        self._num_coming += len(groups)
        self._calendar.at(self._calendar.now_s + self._profile.claim_s, self._put, groups)

    def withdraw(self, ticket_ids: list[str]) -> None:
        """Ends tickets that are no longer needed, in any state."""
        for id_ in ticket_ids:
            self._complete.pop(id_, None)
            if group := self._groups.pop(id_, None):
                self._end_group(group)
        self._settle()

    def update(self, step: int) -> None:
        """Updates every engine to the weights of `step`."""
        self._fleet.update(step)
        self._restart_stale()
        self._settle()

    @property
    def served_step(self) -> int:
        """Step of the oldest weights that any engine serves."""
        return min(actor.engine.step for actor in self._fleet.actors)

    @property
    def num_free_chips(self) -> int:
        """Chips of engines that do not generate: released engines, or all if there is nothing to serve."""
        actors, now_s = self._fleet.actors, self._calendar.now_s
        num_engines = sum(a.is_given_up for a in actors) if now_s >= self._released_s else 0
        if self.is_over and now_s >= self._over_s:
            num_engines = len(actors)
        return num_engines * self._profile.chips_per_engine

    @property
    def is_over(self) -> bool:
        """True if there is nothing to serve."""
        return not self._groups

    def totals(self) -> Totals:
        """Returns the cumulative totals at the current time."""
        self._fleet.advance(self._fleet.actors)
        self._settle()
        return self._fleet.totals()

    def _restart_stale(self) -> None:
        """Restarts stale samples as `Sampler.restart_stale`; a finished one restarts its whole ticket."""
        if self._lag_bound is None:
            return
        for group in list(self._groups.values()):
            oldest = max((a.engine.step for a, _ in group.running.values()), default=0) - self._lag_bound
            if self._config.admission.unit == "group" and any(f.spans[0][0] < oldest for f in group.finished):
                self._fleet.wasted_tokens += sum(tokens for f in group.finished for _, tokens in f.spans)
                self.offer([group.ticket], attempt=group.attempt + 1)
                continue
            for request, (actor, _) in group.running.items():
                step = actor.engine.step
                if group.start_steps[request] < step - self._lag_bound:
                    self._abort(actor, request)
                    group.attempt += 1
                    self._add(actor, group, request)

    def _put(self, groups: list[SimGroup]) -> None:
        self._num_coming -= len(groups)
        for group in groups:
            if self._groups.get(group.ticket.id) is group:
                self._pool.put(group.ticket, num_requests=len(group.lengths))
        self._settle()

    def _settle(self) -> None:
        """Processes finished requests, fills free capacity, and schedules the next engine events."""
        touched: dict[SimActor, None] = {}
        while True:
            while self._fleet.ended:
                self._end_request(*self._fleet.ended.popleft())
            if self._fleet.changed:
                actor, _ = self._fleet.changed.popitem()
            elif (hungriest := self._hunger.next()) is not None:
                actor = hungriest
            else:
                break
            self._serve(actor)
            touched[actor] = None
        self._fleet.await_next(touched)

    def _serve(self, actor: SimActor) -> None:
        if actor.engine.is_draining:
            return  # as in actor/weight_updates.py: no claims or starts until the new weights serve
        admission = actor.admission
        wants_more = False
        if (limit := admission.num_to_claim()) and not actor.is_given_up:
            tickets = self._pool.claim(actor.index, limit, admission.samples_per_engine)
            admission.offer(tickets)
            wants_more = len(tickets) < limit or admission.num_to_claim() > 0
            if tickets and not self._claim_is_told:
                self._claim_is_told = True
                self._calendar.at(self._calendar.now_s, self._tell_claim)
        for ticket in admission.admit(Version(incarnation=0, step=actor.engine.step)):
            self._start(actor, ticket)
        if wants_more:
            self._hunger.note(actor)

    def _tell_claim(self) -> None:
        self._claim_is_told = False
        self._on_claim()

    def _start(self, actor: SimActor, ticket: Ticket) -> None:
        if actor.is_given_up:
            actor = self._fleet.least_loaded()
            self._fleet.note(actor)
        self._fleet.advance([actor])
        group = self._groups[group_id(ticket.id)]
        for _ in range(ticket.num_requests):
            index = group.num_started
            group.num_started += 1
            request = f"{group.ticket.id}.{index}"
            group.running[request] = (actor, ticket.id)
            self._by_request[request] = group
            self._add(actor, group, request, response_tokens=group.lengths[index])

    def _add(self, actor: SimActor, group: SimGroup, request: str, *, response_tokens: int | None = None) -> None:
        """Lets an engine sample a response; without a given length, one of the group's next attempt."""
        is_cached = self._config.actor.prefix_caching and actor.index in group.engines
        group.start_steps[request] = actor.engine.step
        group.engines.add(actor.index)
        if self._episodes is not None:
            self._episodes.begin(actor, group, request, is_cached=is_cached)
            return
        if response_tokens is None:
            (response_tokens,) = self._lengths.responses(int(group.ticket.task.answer), 1, attempt=group.attempt)
        actor.engine.add(
            self._calendar.now_s,
            request,
            priority=group.ticket.order,
            prompt_tokens=group.prompt_tokens,
            response_tokens=response_tokens,
            cached_tokens=group.prompt_tokens if is_cached else 0,
        )

    def _abort(self, actor: SimActor, request: str) -> None:
        if self._episodes is not None:
            self._episodes.end(request)
        else:
            self._fleet.abort(actor, request)

    def _end_request(self, actor: SimActor, finished: FinishedRequest) -> None:
        if self._episodes is not None and "/" in finished.id:
            self._episodes.turn_ended(finished)
            return
        group = self._by_request.pop(finished.id, None)
        if group is None:
            return  # the group was completed or withdrawn at the same time
        _, ticket_id = group.running.pop(finished.id)
        group.finished.append(finished)
        claimer = self._fleet.actors[self._pool.owner(ticket_id)]
        self._fleet.note(actor, claimer)
        if self._gives_up:
            self._recent_lengths.append((group.prompt_tokens, round(sum(tokens for _, tokens in finished.spans))))
            if self._scale_down.is_due():
                self._give_up()
        if len(group.finished) == group.ticket.num_samples:
            self._complete[group.ticket.id] = self._groups.pop(group.ticket.id)
            self._end_group(group)
            self._calendar.at(self._calendar.now_s + self._profile.verifier_s, self._on_group, served(group))
            return
        claimer.admission.finish_sample(ticket_id)
        if ticket_id != group.ticket.id:  # ticket of a single request
            self._pool.end(ticket_id)

    def _end_group(self, group: SimGroup) -> None:
        """Aborts a group's running requests and releases its tickets."""
        for request, (actor, _) in group.running.items():
            self._fleet.advance([actor])
            self._by_request.pop(request, None)
            self._abort(actor, request)
            self._fleet.note(actor)
        group.running.clear()
        for part_id in self._pool.part_ids(group.ticket):
            if (index := self._pool.end(part_id)) is not None:
                claimer = self._fleet.actors[index]
                claimer.admission.remove(part_id)
                self._fleet.note(claimer)
        if self._shares_chips and not self._groups:
            self._over_s = self._calendar.now_s + self._start_s
            self._calendar.at(self._over_s, self._on_free_chips)

    def _give_up(self) -> None:
        """Releases half of the engines for training if the others can hold the running requests."""
        self._fleet.advance(self._fleet.actors)
        num_engines = self._profile.num_engines
        split = num_engines - num_engines // SHARE
        lengths = np.array(self._recent_lengths, np.int32).reshape(-1, 2)
        kv_tokens = split * self._profile.engine.kv_capacity_tokens
        if not self._pays((num_engines - split) * self._profile.chips_per_engine):
            return
        if split == num_engines or not would_fit(lengths, len(self._by_request), kv_tokens):
            return
        self._scale_down.is_done = True
        self._pool.num_engines = split
        for engine_request, actor in self._fleet.give_up(split).items():
            request, _, turn = engine_request.partition("/")
            if turn and self._episodes is not None:
                self._episodes.move(request, actor)
            running = self._by_request[request].running
            running[request] = (actor, running[request][1])
        self._released_s = self._calendar.now_s + self._start_s
        self._calendar.at(self._released_s, self._on_free_chips)

    def _take_back(self) -> None:
        self._scale_down = ScaleDown()
        self._released_s = self._over_s = math.inf
        if self._pool.num_engines < self._profile.num_engines:
            self._pool.num_engines = self._profile.num_engines
            self._fleet.take_back()
