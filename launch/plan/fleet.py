"""All simulated engines: moved through time together, given new weights, handed over and taken back."""

import collections
import dataclasses
from collections.abc import Callable, Iterable

from actor.admission import Admission
from configs.schema import Config
from launch.plan.calendar import Calendar
from launch.plan.groups import SimActor
from launch.plan.profiles import Profile
from launch.plan.sim_engine import NEVER, Finished, SimEngine


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

    def __init__(self, config: Config, profile: Profile, calendar: Calendar, on_event: Callable[[], None]) -> None:
        """Idle engines; `on_event` is called when the calendar came to an engine's next event."""
        self._config, self._profile, self._calendar, self._on_event = config, profile, calendar, on_event

        def actor(index: int) -> SimActor:
            admission = Admission.of(config, max_sequences=profile.engine.max_num_seqs)
            admission.share_among({profile.engine.max_num_seqs: profile.num_engines})
            return SimActor(index, SimEngine(profile.engine), admission)

        self.actors = [actor(i) for i in range(profile.num_engines)]
        self.ended: collections.deque[tuple[SimActor, Finished]] = collections.deque()
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
