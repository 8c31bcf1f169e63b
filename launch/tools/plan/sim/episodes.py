"""Episodes in virtual time: turns on a simulated engine, and between them an environment that takes its time.

What `actor.environments.episode` does: each turn is a request of its own behind all that came before, and while the
environment answers nothing of the episode is in the engine. Each goes on for itself, or all in lock-step, which is the
batch rollout that environment-level asynchrony replaces (ROLL Flash section 5.2.1): the engine generates for all, then
all environments step, then again.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np

from configs.schema import Config
from launch.tools.plan.sim.event_queue import EventQueue
from launch.tools.plan.sim.fleet import Fleet, SimActor, SimGroup
from launch.tools.plan.sim.sim_engine import FinishedRequest
from launch.tools.plan.workload import EpisodeProfile, LatencyProfile, Lengths

_NORMAL = statistics.NormalDist()
_LATENCIES = 3


@dataclasses.dataclass(eq=False, slots=True)
class _Episode:
    """One that is played."""

    id: str
    actor: SimActor
    group: SimGroup
    turn_tokens: list[int]
    """Sampled in each turn."""
    latencies_s: list[float]
    """Of the environment after each turn."""
    turn: int = 0
    num_tokens: int = 0
    """Sampled and observed so far."""
    computed_tokens: int = 0
    """Whose keys and values its engine has."""
    spans: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def request(self) -> str:
        """Its turn's, in the engine."""
        return f"{self.id}/{self.turn}"


class SimEpisodes:
    """All that are played."""

    def __init__(
        self,
        config: Config,
        profile: EpisodeProfile,
        lengths: Lengths,
        calendar: EventQueue,
        fleet: Fleet,
        on_event: Callable[[], None],
        *,
        seed: int,
    ) -> None:
        """None is played; `on_event` is called after something was put into the engines or among what has ended."""
        self._config, self._profile, self._lengths, self._seed = config, profile, lengths, seed
        self._turns = Lengths(profile.num_turns, profile.num_turns, seed=seed)
        self._calendar, self._fleet, self._on_event = calendar, fleet, on_event
        self._free_s = 0.0
        """When the machine that environments run on has done all that it was given."""
        self._played: dict[str, _Episode] = {}
        self._at_barrier: dict[_Episode, Callable[[_Episode], None]] = {}
        """In lock-step: who waits for the others, and what comes then."""

    def begin(self, actor: SimActor, group: SimGroup, request: str, *, is_cached: bool) -> None:
        """Plays a request of a group from its start; `is_cached` if the engine has its prompt."""
        index, problem = int(request.rpartition(".")[2]), int(group.ticket.task.answer)
        (num_turns,) = self._turns.turns(problem, index, 1, attempt=group.attempt)
        episode = _Episode(
            id=request,
            actor=actor,
            group=group,
            turn_tokens=self._lengths.turns(problem, index, num_turns, attempt=group.attempt),
            latencies_s=draw_latencies_s(
                self._profile.step_s, num_turns, key=(self._seed, _LATENCIES, problem, index, group.attempt)
            ),
            computed_tokens=group.prompt_tokens if is_cached else 0,
        )
        self._played[request] = episode
        if self._profile.start_s:
            self._work(episode, self._profile.start_s)
        else:
            self._take_turn(episode)

    def end(self, request: str) -> None:
        """Ends one early; nothing of it comes any more."""
        if (episode := self._played.pop(request, None)) is not None:
            self._fleet.abort(episode.actor, episode.request)
            self._fleet.wasted_tokens += sum(tokens for _, tokens in episode.spans)
            self._at_barrier.pop(episode, None)
            self._pass_barrier()

    def turn_ended(self, finished: FinishedRequest) -> None:
        """A turn that an engine has sampled; the environment steps."""
        episode = self._played.get(finished.id.rpartition("/")[0])
        if episode is None or episode.request != finished.id:
            return  # it was ended at this very moment
        for step, tokens in finished.spans:
            if episode.spans and episode.spans[-1][0] == step:
                tokens += episode.spans.pop()[1]
            episode.spans.append((step, tokens))
        self._fleet.note(episode.actor)
        self._meet(episode, self._step)

    def move(self, request: str, actor: SimActor) -> None:
        """Its engine was given up: it goes on at another, which has nothing of it."""
        if (episode := self._played.get(request)) is not None:
            episode.actor, episode.computed_tokens = actor, 0

    def _meet(self, episode: _Episode, then: Callable[[_Episode], None]) -> None:
        if not self._profile.in_lock_step:
            then(episode)
            return
        self._at_barrier[episode] = then
        self._pass_barrier()

    def _pass_barrier(self) -> None:
        if len(self._at_barrier) == len(self._played):
            waiting, self._at_barrier = self._at_barrier, {}
            for episode, then in waiting.items():
                then(episode)

    def _step(self, episode: _Episode) -> None:
        """The environment has the turn."""
        latency_s = episode.latencies_s[episode.turn]
        episode.num_tokens += episode.turn_tokens[episode.turn]
        if self._config.actor.prefix_caching:
            episode.computed_tokens = episode.group.prompt_tokens + episode.num_tokens
        episode.num_tokens += self._profile.observation_tokens
        episode.turn += 1
        self._calendar.at(self._calendar.now_s + latency_s, self._work, episode, self._profile.turn_s)

    def _work(self, episode: _Episode, took_s: float) -> None:
        """The machine has this to do for an episode, after all else that it was given."""
        self._free_s = max(self._free_s, self._calendar.now_s) + took_s
        self._calendar.at(self._free_s, self._go_on, episode)

    def _go_on(self, episode: _Episode) -> None:
        """Its environment has answered."""
        if self._played.get(episode.id) is not episode:
            return  # it was ended meanwhile
        if episode.turn < len(episode.turn_tokens):
            self._meet(episode, self._take_turn)
        else:
            del self._played[episode.id]
            episode.group.observed_tokens += self._profile.observation_tokens * (episode.turn - 1)
            self._fleet.ended.append((episode.actor, FinishedRequest(episode.id, self._calendar.now_s, episode.spans)))
            self._pass_barrier()
        self._on_event()

    def _take_turn(self, episode: _Episode) -> None:
        if episode.actor.is_given_up:
            self.move(episode.id, self._fleet.least_loaded())
        self._fleet.advance([episode.actor])
        episode.actor.engine.add(
            self._calendar.now_s,
            episode.request,
            priority=episode.group.ticket.order,
            prompt_tokens=episode.group.prompt_tokens + episode.num_tokens,
            response_tokens=episode.turn_tokens[episode.turn],
            cached_tokens=episode.computed_tokens,
        )
        self._fleet.note(episode.actor)


def draw_latencies_s(profile: LatencyProfile, num: int, *, key: tuple[int, ...]) -> list[float]:
    """Latencies from a normal distribution of which what is below 0 is left out; the same for the same key."""
    if profile.deviation_s == 0:
        return [profile.mean_s] * num
    below = _NORMAL.cdf(-profile.mean_s / profile.deviation_s)
    uniform = np.random.default_rng(key).uniform(size=num)
    quantiles = np.minimum(below + (1 - below) * uniform, math.nextafter(1, 0))
    return [max(0.0, profile.mean_s + profile.deviation_s * _NORMAL.inv_cdf(float(q))) for q in quantiles]
