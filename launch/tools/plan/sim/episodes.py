"""Episodes in virtual time: turns on a simulated engine, with environment latencies between them.

As in `actor.environments.episode`, each turn is one request with all earlier tokens as its prompt, and the engine holds
nothing of an episode during an environment step. Episodes proceed independently, or all in lock step, the batch rollout
that environment-level asynchrony replaces (ROLL Flash section 5.2.1): all turns, then all environment steps.
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
    id: str
    actor: SimActor
    group: SimGroup
    turn_tokens: list[int]
    """Sampled tokens per turn."""
    latencies_s: list[float]
    """Environment latency after each turn."""
    turn: int = 0
    num_tokens: int = 0
    """Sampled and observed tokens up to now."""
    computed_tokens: int = 0
    """Tokens whose keys and values are in the engine's cache."""
    spans: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def request(self) -> str:
        """Request id of the current turn in the engine."""
        return f"{self.id}/{self.turn}"


class SimEpisodes:
    """All running episodes."""

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
        """Starts empty; `on_event` is called after requests were added to engines or finished."""
        self._config, self._profile, self._lengths, self._seed = config, profile, lengths, seed
        self._turns = Lengths(profile.num_turns, profile.num_turns, seed=seed)
        self._calendar, self._fleet, self._on_event = calendar, fleet, on_event
        self._free_s = 0.0
        """Time at which the environments' machine has finished its queued work."""
        self._played: dict[str, _Episode] = {}
        self._at_barrier: dict[_Episode, Callable[[_Episode], None]] = {}
        """Episodes waiting in lock step, each with its continuation."""

    def begin(self, actor: SimActor, group: SimGroup, request: str, *, is_cached: bool) -> None:
        """Starts an episode for a request of a group; `is_cached` if the engine has cached its prompt."""
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
        """Aborts an episode."""
        if (episode := self._played.pop(request, None)) is not None:
            self._fleet.abort(episode.actor, episode.request)
            self._fleet.wasted_tokens += sum(tokens for _, tokens in episode.spans)
            self._at_barrier.pop(episode, None)
            self._pass_barrier()

    def turn_ended(self, finished: FinishedRequest) -> None:
        """Handles a sampled turn; the environment steps next."""
        episode = self._played.get(finished.id.rpartition("/")[0])
        if episode is None or episode.request != finished.id:
            return  # the episode was aborted at the same time
        for step, tokens in finished.spans:
            if episode.spans and episode.spans[-1][0] == step:
                tokens += episode.spans.pop()[1]
            episode.spans.append((step, tokens))
        self._fleet.note(episode.actor)
        self._meet(episode, self._step)

    def move(self, request: str, actor: SimActor) -> None:
        """Moves an episode from a released engine to another, which has none of its cache."""
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
        latency_s = episode.latencies_s[episode.turn]
        episode.num_tokens += episode.turn_tokens[episode.turn]
        if self._config.actor.prefix_caching:
            episode.computed_tokens = episode.group.prompt_tokens + episode.num_tokens
        episode.num_tokens += self._profile.observation_tokens
        episode.turn += 1
        self._calendar.at(self._calendar.now_s + latency_s, self._work, episode, self._profile.turn_s)

    def _work(self, episode: _Episode, took_s: float) -> None:
        """Queues work of an episode on the environments' machine."""
        self._free_s = max(self._free_s, self._calendar.now_s) + took_s
        self._calendar.at(self._free_s, self._go_on, episode)

    def _go_on(self, episode: _Episode) -> None:
        if self._played.get(episode.id) is not episode:
            return  # the episode was aborted meanwhile
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
    """Draws latencies from a normal distribution truncated at 0; deterministic per key."""
    if profile.deviation_s == 0:
        return [profile.mean_s] * num
    below = _NORMAL.cdf(-profile.mean_s / profile.deviation_s)
    uniform = np.random.default_rng(key).uniform(size=num)
    quantiles = np.minimum(below + (1 - below) * uniform, math.nextafter(1, 0))
    return [max(0.0, profile.mean_s + profile.deviation_s * _NORMAL.inv_cdf(float(q))) for q in quantiles]
