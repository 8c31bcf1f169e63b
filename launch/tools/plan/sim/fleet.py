"""Fleet of all simulated engines."""

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
    """A complete group for the simulated learner."""

    ticket: Ticket
    tokens: int
    """Prompt and response tokens of all K samples, as trained."""
    response_tokens: int
    tokens_by_step: dict[int, float]
    """Response tokens by step of the weights that generated them."""

    @property
    def ticket_id(self) -> str:
        """Ticket id."""
        return self.ticket.id

    @property
    def order(self) -> int:
        """Order of the ticket."""
        return self.ticket.order

    @property
    def prompt_tokens(self) -> Int32[np.ndarray, " P"]:
        """Prompt tokens of the ticket."""
        return self.ticket.prompt_tokens

    @property
    def min_step(self) -> int:
        """Step of the weights of the oldest token."""
        return min(self.tokens_by_step)

    @property
    def max_step(self) -> int:
        """Step of the weights of the newest token."""
        return max(self.tokens_by_step)

    @property
    def incarnation(self) -> int:
        """Always 0, because a simulated learner never restarts."""
        return 0

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns False, because a simulated learner never rolls back."""
        del base_steps
        return False

    @property
    def actors(self) -> frozenset[str]:
        """Always empty: simulated actors have no names and are never fenced."""
        return frozenset()


@dataclasses.dataclass(eq=False, slots=True)
class SimActor:
    """Engine with its actor's admission state."""

    index: int
    engine: SimEngine
    admission: Admission
    stamp: int = 0
    """Number of its latest calendar entry; older entries are void."""
    hunger: int = -1
    """Tickets held when it last found too few; -1 otherwise."""
    is_given_up: bool = False
    """True if the engine is released for training until the round ends; its claimed requests run elsewhere."""


@dataclasses.dataclass(eq=False, slots=True)
class SimGroup:
    """A group in progress, or complete and not trained."""

    ticket: Ticket
    prompt_tokens: int
    lengths: list[int]
    """Lengths of the responses to sample."""
    attempt: int = 0
    num_started: int = 0
    running: dict[str, tuple[SimActor, str]] = dataclasses.field(default_factory=dict)
    """Actor and ticket id per running request."""
    observed_tokens: int = 0
    """Environment tokens of finished episodes."""
    finished: list[FinishedRequest] = dataclasses.field(default_factory=list)
    engines: set[int] = dataclasses.field(default_factory=set)
    start_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    """Weights served at the start of each request."""


def served(group: SimGroup) -> ServedGroup:
    """Converts a group with all responses sampled into its stored form."""
    by_step: dict[int, float] = {}
    for finished in group.finished:
        for step, tokens in finished.spans:
            by_step[step] = by_step.get(step, 0.0) + tokens
    response_tokens = round(sum(by_step.values()))
    tokens = response_tokens + group.observed_tokens + group.prompt_tokens * group.ticket.num_samples
    return ServedGroup(group.ticket, tokens, response_tokens, by_step)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Cumulative totals over all engines."""

    busy_s: float
    sequence_s: float
    num_preemptions: int
    recomputed_tokens: float
    wasted_tokens: float


class Fleet:
    """All engines, with queues of finished requests and changed engines."""

    def __init__(self, config: Config, profile: Profile, calendar: EventQueue, on_event: Callable[[], None]) -> None:
        """Creates idle engines; `on_event` is called at each scheduled engine event."""
        self._config, self._profile, self._calendar, self._on_event = config, profile, calendar, on_event

        def actor(index: int) -> SimActor:
            admission = Admission.of(config, max_sequences=profile.engine.max_num_seqs)
            admission.rebalance({profile.engine.max_num_seqs: profile.num_engines})
            return SimActor(index, SimEngine(profile.engine), admission)

        self.actors = [actor(i) for i in range(profile.num_engines)]
        self.ended: collections.deque[tuple[SimActor, FinishedRequest]] = collections.deque()
        """Finished responses that are not processed yet."""
        self.changed: dict[SimActor, None] = {}
        """Engines that may have new room."""
        self.wasted_tokens = 0.0

    def note(self, *actors: SimActor) -> None:
        """Marks engines as changed."""
        self.changed.update(dict.fromkeys(actors))

    def advance(self, actors: Iterable[SimActor]) -> None:
        """Advances engines to the current time."""
        for actor in actors:
            self.ended.extend((actor, f) for f in actor.engine.advance(self._calendar.now_s))

    def abort(self, actor: SimActor, request: str) -> None:
        """Aborts a request and counts its tokens as wasted."""
        self.wasted_tokens += actor.engine.abort(self._calendar.now_s, request)

    def await_next(self, actors: Iterable[SimActor]) -> None:
        """Schedules the next event of each engine, replacing its earlier one."""
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
        """Updates every engine to the weights of `step`."""
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
        """Returns the serving engine with the fewest requests."""
        return min((a for a in self.actors if not a.is_given_up), key=lambda a: a.engine.num_requests)

    def give_up(self, num_stay: int) -> dict[str, SimActor]:
        """Releases all but the first `num_stay` engines; returns the new actor per moved request."""
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
        """Lets all engines serve again."""
        for actor in self.actors:
            actor.is_given_up = False
        self.note(*self.actors)

    def totals(self) -> Totals:
        """Returns the totals at each engine's last advance."""
        engines = [a.engine for a in self.actors]
        return Totals(
            busy_s=sum(e.busy_s for e in engines),
            sequence_s=sum(e.sequence_s for e in engines),
            num_preemptions=sum(e.num_preemptions for e in engines),
            recomputed_tokens=sum(e.recomputed_tokens for e in engines),
            wasted_tokens=self.wasted_tokens,
        )
