"""The actors' side in virtual time: N engines that claim from one pool under the real admission code."""

import collections
import dataclasses
import heapq
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from actor.admission import Admission
from bridge.types import Ticket, Version
from configs.schema import Config
from launch.plan.calendar import Calendar
from launch.plan.chips import SHARE, ScaleDown, would_fit
from launch.plan.lengths import Lengths
from launch.plan.pool import TicketPool, group_id
from launch.plan.profiles import Profile
from launch.plan.sim_engine import NEVER, Finished, SimEngine

NUM_RECENT = 1024
"""Responses whose lengths are remembered, as in `actor/vllm/stats.py`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedGroup:
    """A complete group as the learner gets it."""

    ticket: Ticket
    tokens: int
    """Prompt and response tokens of all K, which is what training costs by."""
    response_tokens: int
    tokens_by_step: dict[int, float]
    """Response tokens by the step of the weights that made them."""

    @property
    def ticket_id(self) -> str:
        """Its ticket's."""
        return self.ticket.id

    @property
    def order(self) -> int:
        """Its ticket's."""
        return self.ticket.order

    @property
    def prompt_tokens(self) -> Int32[np.ndarray, " P"]:
        """Its ticket's."""
        return self.ticket.prompt_tokens

    @property
    def min_step(self) -> int:
        """Step of the weights behind its oldest token."""
        return min(self.tokens_by_step)

    @property
    def max_step(self) -> int:
        """Step of the weights behind its newest token."""
        return max(self.tokens_by_step)

    @property
    def incarnation(self) -> int:
        """A simulated learner is never started again."""
        return 0

    @property
    def actors(self) -> frozenset[str]:
        """Simulated engines have no names, and none is fenced."""
        return frozenset()


@dataclasses.dataclass(frozen=True)
class Totals:
    """What the engines did since the start, summed."""

    busy_s: float
    sequence_s: float
    num_preemptions: int
    recomputed_tokens: float
    wasted_tokens: float


@dataclasses.dataclass(eq=False, slots=True)
class _Actor:
    index: int
    engine: SimEngine
    admission: Admission
    stamp: int = 0
    """Of its last entry in the calendar; older ones are void."""
    hunger: int = -1
    """Tickets it held when it last found too few; -1 when it did not."""
    is_given_up: bool = False
    """Its chips train until the round ends; what it claimed runs on the others."""


@dataclasses.dataclass(eq=False, slots=True)
class _Group:
    ticket: Ticket
    prompt_tokens: int
    lengths: list[int]
    """Of the responses to sample."""
    attempt: int = 0
    num_started: int = 0
    running: dict[str, tuple[_Actor, str]] = dataclasses.field(default_factory=dict)
    """By request: where, and under which ticket."""
    finished: list[Finished] = dataclasses.field(default_factory=list)
    engines: set[int] = dataclasses.field(default_factory=set)
    start_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    """By request: the weights served when it was made."""


class SimActors:
    """All engines."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        lengths: Lengths,
        calendar: Calendar,
        on_group: Callable[[ServedGroup], None],
        *,
        on_claim: Callable[[], None] = lambda: None,
        on_free_chips: Callable[[], None] = lambda: None,
    ) -> None:
        """Idle, serving weights of step 0.

        Args:
          config: the run's.
          profile: the engines'.
          lengths: of prompts and responses.
          calendar: the time.
          on_group: called when a group is in the store.
          on_claim: called after tickets were claimed.
          on_free_chips: called when there are more `num_free_chips`, of a learner without chips of its own.
        """
        self._config, self._profile, self._lengths = config, profile, lengths
        self._calendar, self._on_group = calendar, on_group
        self._on_claim, self._on_free_chips = on_claim, on_free_chips
        self._shares_chips = profile.num_learner_chips == 0
        self._gives_up = self._shares_chips and config.rounds.train_start == "group_ready"
        self._scale_down = ScaleDown()
        self._recent_lengths: collections.deque[tuple[int, int]] = collections.deque(maxlen=NUM_RECENT)
        """Prompt and response tokens of the last requests that ended."""
        self._lag_bound = config.lag_bound if config.publish.when == "every" else None
        by_sample = config.admission.unit == "sample"
        policy = config.admission.policy
        self._pool = TicketPool(
            num_engines=profile.num_engines,
            width=config.admission_width if policy == "frontier" else None,
            by_sample=by_sample,
            shares=policy != "window",
        )

        def actor(index: int) -> _Actor:
            admission = Admission.of(config, max_sequences=profile.engine.max_num_seqs)
            admission.share_among([profile.engine.max_num_seqs] * (profile.num_engines - 1))
            return _Actor(index, SimEngine(profile.engine), admission)

        self._actors = [actor(i) for i in range(profile.num_engines)]
        # Actors with room, by the tickets they hold: new ones go to who has the fewest. Old entries are void.
        self._hungry: list[tuple[int, int, _Actor]] = []
        for a in self._actors:
            self._note_hunger(a)
        self._groups: dict[str, _Group] = {}
        self._by_request: dict[str, _Group] = {}
        self._complete: dict[str, _Group] = {}
        """Groups that the learner has and has not trained."""
        self._num_coming = 0
        """Tickets that are offered, and not yet in the pool."""
        self._claim_is_told = False
        self._ended: collections.deque[tuple[_Actor, Finished]] = collections.deque()
        self._changed: dict[_Actor, None] = {}
        self._wasted_tokens = 0.0

    def offer(self, tickets: list[Ticket], *, attempt: int = 0) -> None:
        """Tickets to serve, the problem's number as their answer; what those ids had before is forgotten."""
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
            groups.append(_Group(ticket, self._lengths.prompt(problem), lengths, attempt))
        self._offer(groups)

    def offer_again(self, ticket: Ticket, *, attempt: int, older_than: int | None) -> None:
        """Asks for a complete group anew; where samples are tickets of their own, for those begun before a step."""
        group = self._complete.pop(ticket.id, None)
        finished = [] if group is None or older_than is None else group.finished
        kept = [f for f in finished if older_than is not None and f.spans[0][0] >= older_than]
        if group is None or not kept or self._config.admission.unit == "group":
            self.offer([ticket], attempt=attempt)
            return
        lengths = self._lengths.responses(int(ticket.task.answer), ticket.num_samples - len(kept), attempt=attempt)
        self._offer([_Group(ticket, group.prompt_tokens, lengths, attempt, finished=kept, engines=group.engines)])

    def acknowledge(self, ticket_id: str) -> None:
        """The learner has trained this group."""
        self._complete.pop(ticket_id, None)

    @property
    def num_unclaimed(self) -> int:
        """Groups' tickets that no engine has claimed."""
        per_group = self._config.rounds.requests_per_group if self._config.admission.unit == "sample" else 1
        return self._num_coming + -(-self._pool.num_open // per_group)

    def _offer(self, groups: list[_Group]) -> None:
        self._groups |= {g.ticket.id: g for g in groups}
        self._num_coming += len(groups)
        self._calendar.at(self._calendar.now_s + self._profile.claim_s, self._put, groups)

    def withdraw(self, ticket_ids: list[str]) -> None:
        """Ends what nobody waits for any more, wherever it is."""
        for id_ in ticket_ids:
            self._complete.pop(id_, None)
            if group := self._groups.pop(id_, None):
                self._end_group(group)
        self._settle()

    def update(self, step: int) -> None:
        """Every engine has fetched the weights of `step` and takes them."""
        publish = self._config.publish
        for actor in self._actors:
            self._advance(actor)
            actor.engine.update(
                self._calendar.now_s,
                step=step,
                pause_s=self._profile.publish.pause_s,
                at_publish=publish.at_publish,
                recompute=publish.kv_cache == "recompute",
            )
            self._changed[actor] = None
        self._restart_stale()
        self._settle()

    @property
    def num_free_chips(self) -> int:
        """Chips of engines that don't generate: those given up, and all when nothing is to be served."""
        engines = [a for a in self._actors if a.is_given_up] if self._groups else self._actors
        return len(engines) * self._profile.chips_per_engine

    def totals(self) -> Totals:
        """Up to now."""
        for actor in self._actors:
            self._advance(actor)
        self._settle()
        engines = [a.engine for a in self._actors]
        return Totals(
            busy_s=sum(e.busy_s for e in engines),
            sequence_s=sum(e.sequence_s for e in engines),
            num_preemptions=sum(e.num_preemptions for e in engines),
            recomputed_tokens=sum(e.recomputed_tokens for e in engines),
            wasted_tokens=self._wasted_tokens,
        )

    def _restart_stale(self) -> None:
        """Begins samples anew that began too long ago, each for itself (`Actor.restart_stale`)."""
        if self._lag_bound is None:
            return
        for group in self._groups.values():
            for request, (actor, _) in group.running.items():
                step = actor.engine.step
                if group.start_steps[request] < step - self._lag_bound:
                    self._wasted_tokens += actor.engine.abort(self._calendar.now_s, request)
                    group.attempt += 1
                    self._add(actor, group, request)

    def _put(self, groups: list[_Group]) -> None:
        self._num_coming -= len(groups)
        for group in groups:
            if self._groups.get(group.ticket.id) is group:
                self._pool.put(group.ticket, num_requests=len(group.lengths))
        self._settle()

    def _on_engine(self, actor: _Actor, stamp: int) -> None:
        if stamp == actor.stamp:
            self._advance(actor)
            self._changed[actor] = None
            self._settle()

    def _advance(self, actor: _Actor) -> None:
        self._ended.extend((actor, f) for f in actor.engine.advance(self._calendar.now_s))

    def _settle(self) -> None:
        """After anything happened: books what ended, fills what is free, and asks to be called at the next event."""
        touched: dict[_Actor, None] = {}
        while True:
            while self._ended:
                self._end_request(*self._ended.popleft())
            if self._changed:
                actor, _ = self._changed.popitem()
            elif (hungriest := self._next_hungry()) is not None:
                actor = hungriest
            else:
                break
            self._serve(actor)
            touched[actor] = None
        for actor in touched:
            actor.stamp += 1
            if (at_s := actor.engine.next_event_s()) < NEVER:
                self._calendar.at(at_s, self._on_engine, actor, actor.stamp)

    def _serve(self, actor: _Actor) -> None:
        if actor.engine.is_draining:
            return  # as in actor/duties/weights.py: nothing is claimed or starts before the new weights serve
        admission = actor.admission
        is_short = False
        if (limit := admission.num_to_claim()) and not actor.is_given_up:
            tickets = self._pool.claim(actor.index, limit)
            admission.offer(tickets)
            is_short = len(tickets) < limit
            if tickets and not self._claim_is_told:
                self._claim_is_told = True
                self._calendar.at(self._calendar.now_s, self._tell_claim)
        for ticket in admission.admit(Version(incarnation=0, step=actor.engine.step)):
            self._start(actor, ticket)
        if is_short:
            self._note_hunger(actor)

    def _tell_claim(self) -> None:
        self._claim_is_told = False
        self._on_claim()

    def _note_hunger(self, actor: _Actor) -> None:
        entry = (self._pool.num_held(actor.index), actor.index, actor)
        if actor.hunger != entry[0]:
            actor.hunger = entry[0]
            heapq.heappush(self._hungry, entry)

    def _next_hungry(self) -> _Actor | None:
        """An actor that gets something from the pool."""
        while self._hungry and self._pool.has_offer:
            num_held, _, actor = self._hungry[0]
            is_current = num_held == actor.hunger and num_held == self._pool.num_held(actor.index)
            if is_current and self._pool.share_of(actor.index) == 0:
                return None  # it holds the fewest, so whoever has room has its part
            heapq.heappop(self._hungry)
            if num_held == actor.hunger:
                actor.hunger = -1
                return actor
        return None

    def _start(self, actor: _Actor, ticket: Ticket) -> None:
        if actor.is_given_up:
            actor = min((a for a in self._actors if not a.is_given_up), key=lambda a: a.engine.num_requests)
            self._changed[actor] = None
        self._advance(actor)
        group = self._groups[group_id(ticket.id)]
        for _ in range(ticket.num_requests):
            index = group.num_started
            group.num_started += 1
            request = f"{group.ticket.id}.{index}"
            group.running[request] = (actor, ticket.id)
            self._by_request[request] = group
            self._add(actor, group, request, response_tokens=group.lengths[index])

    def _add(self, actor: _Actor, group: _Group, request: str, *, response_tokens: int | None = None) -> None:
        """Has an engine sample a response; of no given length, one of the group's next attempt."""
        if response_tokens is None:
            (response_tokens,) = self._lengths.responses(int(group.ticket.task.answer), 1, attempt=group.attempt)
        group.start_steps[request] = actor.engine.step
        actor.engine.add(
            self._calendar.now_s,
            request,
            priority=group.ticket.order,
            prompt_tokens=group.prompt_tokens,
            response_tokens=response_tokens,
            is_cached=self._config.actor.prefix_caching and actor.index in group.engines,
        )
        group.engines.add(actor.index)

    def _end_request(self, actor: _Actor, finished: Finished) -> None:
        group = self._by_request.pop(finished.id, None)
        if group is None:
            return  # its group was complete, or withdrawn, at this very moment
        _, ticket_id = group.running.pop(finished.id)
        group.finished.append(finished)
        claimer = self._actors[self._pool.owner(ticket_id)]
        self._changed[actor] = self._changed[claimer] = None
        if self._gives_up:
            self._recent_lengths.append((group.prompt_tokens, round(sum(tokens for _, tokens in finished.spans))))
            if self._scale_down.is_due():
                self._give_up()
        if len(group.finished) == group.ticket.num_samples:
            self._complete[group.ticket.id] = self._groups.pop(group.ticket.id)
            self._end_group(group)
            self._calendar.at(self._calendar.now_s + self._profile.verifier_s, self._on_group, _served(group))
            return
        claimer.admission.finish_sample(ticket_id)
        if ticket_id != group.ticket.id:  # a single request's
            self._pool.end(ticket_id)

    def _end_group(self, group: _Group) -> None:
        """Aborts what still runs of it, and takes back what nobody claimed."""
        for request, (actor, _) in group.running.items():
            self._advance(actor)
            self._by_request.pop(request, None)
            self._wasted_tokens += actor.engine.abort(self._calendar.now_s, request)
            self._changed[actor] = None
        group.running.clear()
        for part_id in self._pool.part_ids(group.ticket):
            if (index := self._pool.end(part_id)) is not None:
                self._actors[index].admission.remove(part_id)
                self._changed[self._actors[index]] = None
        if self._shares_chips and not self._groups:
            self._calendar.at(self._calendar.now_s, self._on_free_chips)

    def _give_up(self) -> None:
        """Half of the engines train from now on, if the others can hold what still runs."""
        for actor in self._actors:
            self._advance(actor)
        split = len(self._actors) - len(self._actors) // SHARE
        stay, leave = self._actors[:split], self._actors[split:]
        lengths = np.array(self._recent_lengths, np.int32).reshape(-1, 2)
        if not leave or not would_fit(lengths, len(self._by_request), split * self._profile.engine.kv_capacity_tokens):
            return
        self._scale_down.is_done = True
        self._pool.num_engines = split
        for actor in leave:
            actor.is_given_up = True
            hosts = actor.engine.hand_over(self._calendar.now_s, [a.engine for a in stay])
            for request, index in hosts.items():
                running = self._by_request[request].running
                running[request] = (stay[index], running[request][1])
            self._changed[actor] = None
        self._changed.update(dict.fromkeys(stay))
        self._calendar.at(self._calendar.now_s, self._on_free_chips)

    def _take_back(self) -> None:
        """Another round begins: every engine serves again."""
        self._scale_down = ScaleDown()
        if self._pool.num_engines < len(self._actors):
            self._pool.num_engines = len(self._actors)
            for actor in self._actors:
                actor.is_given_up = False
                self._changed[actor] = None


def _served(group: _Group) -> ServedGroup:
    by_step: dict[int, float] = {}
    for finished in group.finished:
        for step, tokens in finished.spans:
            by_step[step] = by_step.get(step, 0.0) + tokens
    response_tokens = round(sum(by_step.values()))
    tokens = response_tokens + group.prompt_tokens * group.ticket.num_samples
    return ServedGroup(group.ticket, tokens, response_tokens, by_step)
