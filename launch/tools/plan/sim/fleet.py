"""All simulated engines."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jaxtyping import Int32

from actor.admission import Admission
from bridge.rollout_types import Ticket
from configs.schema import Config
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.event_queue import EventQueue
from launch.tools.plan.sim.sim_engine import NEVER, FinishedRequest, SimEngine


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

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns False: a simulated learner never goes back."""
        del base_steps
        return False

    @property
    def actors(self) -> frozenset[str]:
        """Simulated engines have no names, and none is fenced."""
        return frozenset()


@dataclasses.dataclass(eq=False, slots=True)
class SimActor:
    """One engine, and what its actor has in service."""

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
class SimGroup:
    """In progress, or complete and not trained yet."""

    ticket: Ticket
    prompt_tokens: int
    lengths: list[int]
    """Of the responses to sample."""
    attempt: int = 0
    num_started: int = 0
    running: dict[str, tuple[SimActor, str]] = dataclasses.field(default_factory=dict)
    """By request: where, and under which ticket."""
    observed_tokens: int = 0
    """What environments said in episodes that ended."""
    finished: list[FinishedRequest] = dataclasses.field(default_factory=list)
    engines: set[int] = dataclasses.field(default_factory=set)
    start_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    """By request: the weights served when it was made."""


def served(group: SimGroup) -> ServedGroup:
    """A group as the store has it, all its responses sampled."""
    by_step: dict[int, float] = {}
    for finished in group.finished:
        for step, tokens in finished.spans:
            by_step[step] = by_step.get(step, 0.0) + tokens
    response_tokens = round(sum(by_step.values()))
    tokens = response_tokens + group.observed_tokens + group.prompt_tokens * group.ticket.num_samples
    return ServedGroup(group.ticket, tokens, response_tokens, by_step)


@dataclasses.dataclass(frozen=True)
class Totals:
    """What the engines did since the start, summed."""

    busy_s: float
    sequence_s: float
    num_preemptions: int
    recomputed_tokens: float
    wasted_tokens: float


class Fleet:
    """The engines, and what of them waits to be looked at."""

    def __init__(self, config: Config, profile: Profile, calendar: EventQueue, on_event: Callable[[], None]) -> None:
        """Idle engines; `on_event` is called when the calendar came to an engine's next event."""
        self._config, self._profile, self._calendar, self._on_event = config, profile, calendar, on_event

        def actor(index: int) -> SimActor:
            admission = Admission.of(config, max_sequences=profile.engine.max_num_seqs)
            admission.rebalance({profile.engine.max_num_seqs: profile.num_engines})
            return SimActor(index, SimEngine(profile.engine), admission)

        self.actors = [actor(i) for i in range(profile.num_engines)]
        self.ended: collections.deque[tuple[SimActor, FinishedRequest]] = collections.deque()
        """Responses that ended, not booked yet."""
        self.changed: dict[SimActor, None] = {}
        """Engines that may have room since they were last looked at."""
        self.wasted_tokens = 0.0
        """Sampled, and wanted by nobody."""

    def note(self, *actors: SimActor) -> None:
        """Something happened to these."""
        self.changed.update(dict.fromkeys(actors))

    def advance(self, actors: Iterable[SimActor]) -> None:
        """Moves engines up to now."""
        for actor in actors:
            self.ended.extend((actor, f) for f in actor.engine.advance(self._calendar.now_s))

    def abort(self, actor: SimActor, request: str) -> None:
        """Ends a request whose tokens nobody wants."""
        self.wasted_tokens += actor.engine.abort(self._calendar.now_s, request)

    def await_next(self, actors: Iterable[SimActor]) -> None:
        """Has the calendar call at the next event of each of these engines, and no more at what was theirs before."""
        for actor in actors:
            actor.stamp += 1
            if (at_s := actor.engine.next_event_s()) < NEVER:
                self._calendar.at(at_s, self._on_engine, actor, actor.stamp)

    def _on_engine(self, actor: SimActor, stamp: int) -> None:
        if stamp == actor.stamp:
            self.advance([actor])
            self.note(actor)
            self._on_event()

    def update(self, step: int) -> None:
        """Every engine takes the weights of `step`."""
        publish = self._config.publish
        for actor in self.actors:
            self.advance([actor])
            actor.engine.update(
                self._calendar.now_s,
                step=step,
                pause_s=self._profile.publish.pause_s,
                at_publish=publish.at_publish,
                recompute=publish.kv_cache == "recompute",
            )
            self.note(actor)

    def least_loaded(self) -> SimActor:
        """Of those that serve."""
        return min((a for a in self.actors if not a.is_given_up), key=lambda a: a.engine.num_requests)

    def give_up(self, num_stay: int) -> dict[str, SimActor]:
        """All but the first `num_stay` serve no more; returns where the requests that they had go on."""
        stay, leave = self.actors[:num_stay], self.actors[num_stay:]
        moved: dict[str, SimActor] = {}
        for actor in leave:
            actor.is_given_up = True
            hosts = actor.engine.hand_over(self._calendar.now_s, [a.engine for a in stay])
            moved |= {request: stay[index] for request, index in hosts.items()}
            self.note(actor)
        self.note(*stay)
        return moved

    def take_back(self) -> None:
        """All serve again."""
        for actor in self.actors:
            actor.is_given_up = False
        self.note(*self.actors)

    def totals(self) -> Totals:
        """Up to where each was last moved."""
        engines = [a.engine for a in self.actors]
        return Totals(
            busy_s=sum(e.busy_s for e in engines),
            sequence_s=sum(e.sequence_s for e in engines),
            num_preemptions=sum(e.num_preemptions for e in engines),
            recomputed_tokens=sum(e.recomputed_tokens for e in engines),
            wasted_tokens=self.wasted_tokens,
        )
