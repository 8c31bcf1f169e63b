"""What saturates first: store, network, learner, engines.

A part that is asked for more than it can take gives out: learner or engines set the pace then, a store holds all up,
and links let actors skip versions (`weight_parts`).
"""

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from configs.schema import Config
from launch.tools.plan.control_plane.loads import (
    BYTES,
    GROUPS,
    Resource,
    Workload,
    control_calls,
    group_bytes,
    store_parts,
    weight_parts,
)
from launch.tools.plan.control_plane.transfers import Transfers, publishes_per_s
from launch.tools.plan.profile import Profile, StoreProfile
from launch.tools.plan.sim.chips import Cost
from launch.tools.plan.sim.event_queue import EventQueue

_LOWEST, _NUM_PACES, _HALVINGS = 1e-4, 80, 30
"""Of the paces that are tried: the lowest over the highest, how many, and how often what lies between two is halved."""


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """A run's config and hardware, with what follows from them worked out once."""

    config: Config
    profile: Profile
    workload: Workload
    transfers: Transfers | None
    train_groups_per_s: float
    """That the learner's chips can take."""
    generate_groups_per_s: float
    """That all engines can sample together."""
    engines_stay_full: bool
    """However slow the learner is: groups give way to newer ones. Else engines without tickets ask for them."""

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "ClusterModel":
        """Of a run."""
        work = Workload.of(config, profile)
        train, generate = train_groups_per_s(config, profile, work), generate_groups_per_s(config, profile, work)
        full = config.admission.when_full == "drop_oldest"
        return cls(config, profile, work, Transfers.of(config, profile), train, generate, full)

    @property
    def groups_go_to_bucket(self) -> bool:
        """Whether the store has only a reference of what is handed in."""
        store, num_puts = self.config.store, self.workload.puts_per_group
        return bool(store.bucket) and self.workload.group_bytes / num_puts > store.inline_bytes

    def parts(self, groups_per_s: float) -> list[Resource]:
        """All, at that pace."""
        made = self._compute_parts(groups_per_s)
        if (store := self.profile.store) is not None:
            made += store_parts(
                store,
                seconds=self.store_seconds(store, groups_per_s),
                stored_bytes_per_s=self._stored_bytes_per_s(groups_per_s),
                num_actors=self.profile.num_engines,
            )
        if self.transfers is not None and self.transfers.way != "memory":
            made += weight_parts(self.transfers, publishes_per_s(self.config, groups_per_s))
        return made

    def store_seconds(self, store: StoreProfile, groups_per_s: float) -> dict[str, float]:
        """Of the store's time a second, by what it does."""
        room = 0.0 if self.engines_stay_full else max(0.0, 1.0 - groups_per_s / self.generate_groups_per_s)
        calls = control_calls(
            self.config, num_actors=self.profile.num_engines, groups_per_s=groups_per_s, share_with_room=room
        )
        stored = self._stored_bytes_per_s(groups_per_s)
        groups_s = groups_per_s * self.workload.puts_per_group * store.group_s
        return {GROUPS: groups_s, BYTES: stored * store.byte_s} | calls.seconds(store)

    def _stored_bytes_per_s(self, groups_per_s: float) -> float:
        return 0.0 if self.groups_go_to_bucket else groups_per_s * self.workload.group_bytes

    def _compute_parts(self, groups_per_s: float) -> list[Resource]:
        work = self.workload
        generated, trained = work.num_requests * work.response_tokens, work.group_tokens
        made = [
            Resource(
                name="generation",
                load=groups_per_s * generated,
                capacity=self.generate_groups_per_s * generated,
                unit="tokens/s",
                remedy=self._generation_remedy(),
            ),
            Resource(
                name="learner compute",
                load=groups_per_s * trained,
                capacity=self.train_groups_per_s * trained,
                unit="tokens/s",
                remedy="more learner chips (num_learner_chips)",
            ),
        ]
        if self.profile.network is not None and self.profile.network.learner_bytes_per_s:
            made.append(
                Resource(
                    name="leading host's link",  # it alone reads the groups, wherever they lie
                    load=groups_per_s * work.group_bytes,
                    capacity=self.profile.network.learner_bytes_per_s,
                    unit="B/s",
                    remedy="a faster link of the learner's first host",
                )
            )
        return made

    def _generation_remedy(self) -> str:
        if responses_in_service(self.config) < self.profile.num_engines * _places(self.profile, self.workload):
            return "a wider window (admission, rounds.groups_per_round): engines have more places than it fills"
        return "more engines (num_engines), or larger ones"


def train_groups_per_s(config: Config, profile: Profile, work: Workload) -> float:
    """That the learner's chips can take: passes over a full update, the optimizer's steps, its share of an export."""
    learner, num_groups = profile.learner, config.rounds.groups_per_update
    cost = Cost(learner, learner.micro_batch_tokens or config.packing.rows * config.packing.row_tokens)
    chips = profile.num_learner_chips or profile.num_engines * profile.chips_per_engine
    pass_s = cost.of(round(num_groups * work.group_tokens), chips) + learner.optimizer_step_s
    export_s = profile.publish.export_s * publishes_per_s(config, num_groups)
    return num_groups / (config.rounds.epochs * pass_s + export_s)


def generate_groups_per_s(config: Config, profile: Profile, work: Workload) -> float:
    """That all engines can sample together, each running all the time what admission gives it and it has places for.

    No more than that: a round's end leaves places empty.
    """
    engine = profile.engine
    places = min(_places(profile, work), responses_in_service(config) / profile.num_engines)
    running, rates = (0.0, *engine.running), (0.0, *engine.tokens_per_s)
    tokens_per_s = max(float(np.interp(h, running, rates)) for h in (places, *(r for r in running if r <= places)))
    prefill_s = work.prompt_tokens * engine.prefill_s_per_token
    request_s = work.response_tokens / tokens_per_s + prefill_s + engine.request_s
    return profile.num_engines / (request_s * work.num_requests)


def _places(profile: Profile, work: Workload) -> float:
    """Sequences that an engine runs at once: vLLM's bound, or what its cache holds."""
    engine = profile.engine
    if not engine.kv_capacity_tokens:
        return float(engine.max_num_seqs)
    return min(float(engine.max_num_seqs), max(1.0, engine.kv_capacity_tokens / work.context_tokens))


def responses_in_service(config: Config) -> int:
    """Responses that are sampled at once at most, on all engines together."""
    if config.admission.policy == "window":
        return config.sequences
    groups = config.admission_width or config.rounds.groups_issued
    return groups * config.rounds.requests_per_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The first part to give out as a run's pace rises."""

    groups_per_s: float
    """Up to which nothing gives out; 0 if something does whatever the pace."""
    part: Resource
    """At that pace."""


def bottleneck(cluster: ClusterModel, *, but: Collection[str] = ()) -> Bottleneck:
    """The pace at which a first part's share reaches 1, and which one that is.

    Shares need not rise with the pace throughout (actors whose engines are full ask for fewer tickets), so paces are
    tried from low to high.

    Args:
      cluster: the run.
      but: names of parts that are taken to be mended; learner and engines bound the paces all the same.
    """

    def worst(pace: float) -> Resource:
        return max((p for p in cluster.parts(pace) if p.name not in but), key=lambda part: part.share)

    highest = min(cluster.train_groups_per_s, cluster.generate_groups_per_s)
    below = 0.0
    for above in (0.0, *(highest * _LOWEST ** (1 - i / _NUM_PACES) for i in range(_NUM_PACES)), highest):
        if worst(above).share >= 1 or above == highest:
            break
        below = above
    for _ in range(_HALVINGS if above else 0):
        middle = (below + above) / 2
        if worst(middle).share >= 1:
            above = middle
        else:
            below = middle
    return Bottleneck(groups_per_s=above, part=worst(above))


_MOST_CONTROL = 0.95
"""Part of the store's time that control calls get at most: their callers wait for one before they make the next."""


class StoreQueue:
    """First come, first served."""

    def __init__(self, config: Config, profile: Profile, store: StoreProfile, calendar: EventQueue) -> None:
        """Nobody is in line."""
        self._calendar, self._store = calendar, store
        self._free_at_s = 0.0
        self.num_groups = 0
        self.spent_s = 0.0
        """From being handed in to being there for the learner, summed over groups."""
        cluster = ClusterModel.of(config, profile)
        self._goes_to_bucket, self._num_puts = cluster.groups_go_to_bucket, cluster.workload.puts_per_group
        # At the pace at which something gives out; if that is the store, groups take just what control calls leave.
        seconds = cluster.store_seconds(store, bottleneck(cluster).groups_per_s)
        control = sum(s for name, s in seconds.items() if name not in (GROUPS, BYTES))
        self._stretch = 1 / (1 - min(control, _MOST_CONTROL))
        """A group takes so many times its own seconds, control calls being served in between."""

    @property
    def mean_s(self) -> float:
        """From a group's being handed in to its being there for the learner."""
        return self.spent_s / max(1, self.num_groups)

    def put(self, *, num_samples: int, prompt_tokens: int, response_tokens: int, then: Callable[[], None]) -> None:
        """Hands a group in; `then` is called when the learner may read it.

        Single samples (admission.unit=sample) are counted as handed in together, with the last of them.
        """
        now_s = self._calendar.now_s
        num_bytes = group_bytes(num_samples=num_samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        took_s = self._num_puts * self._store.group_s
        took_s += 0.0 if self._goes_to_bucket else num_bytes * self._store.byte_s
        self._free_at_s = max(self._free_at_s, now_s) + took_s * self._stretch
        self.num_groups += 1
        self.spent_s += self._free_at_s - now_s
        self._calendar.at(self._free_at_s, then)
