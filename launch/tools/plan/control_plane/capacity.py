"""First bottleneck of store, network, learner and engines.

An overloaded learner or engine limits the pace, an overloaded store delays everything, and overloaded links make actors
skip versions (`weight_parts`).
"""

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from bridge.store.open import INLINE_BYTES
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
"""Search grid of paces: lowest over highest, number of paces, number of bisections."""


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """Config and hardware of a run, with derived quantities."""

    config: Config
    profile: Profile
    workload: Workload
    transfers: Transfers | None
    train_groups_per_s: float
    generate_groups_per_s: float
    engines_stay_full: bool
    """True if engines stay busy with any learner speed, because new groups replace old ones. Otherwise idle engines ask
    for tickets."""

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "ClusterModel":
        """Derives the model of a run."""
        work = Workload.of(config, profile)
        train, generate = train_groups_per_s(config, profile, work), generate_groups_per_s(config, profile, work)
        full = config.admission.when_full == "drop_oldest"
        return cls(config, profile, work, Transfers.of(config, profile), train, generate, full)

    @property
    def groups_go_to_bucket(self) -> bool:
        """True if the store holds only references, because submissions exceed `INLINE_BYTES`."""
        bytes_per_put = self.workload.group_bytes / self.workload.puts_per_group
        return bool(self.config.store.bucket) and bytes_per_put > INLINE_BYTES

    def parts(self, groups_per_s: float) -> list[Resource]:
        """Returns all resources at a pace."""
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
        """Returns the store seconds per second by kind of call."""
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
                    name="leading host's link",  # it alone reads the groups, from the store or a bucket
                    load=groups_per_s * work.group_bytes,
                    capacity=self.profile.network.learner_bytes_per_s,
                    unit="B/s",
                    remedy="a faster link of the learner's first host",
                )
            )
        return made

    def _generation_remedy(self) -> str:
        if responses_in_service(self.config) < self.profile.num_engines * _places(self.profile, self.workload):
            return "a wider window (admission, rounds.groups_per_round): it does not fill the engines' slots"
        return "more engines (num_engines), or larger ones"


def train_groups_per_s(config: Config, profile: Profile, work: Workload) -> float:
    """Returns the groups/s that the learner can train; epochs, optimizer steps and weight exports cost time."""
    learner, num_groups = profile.learner, config.rounds.groups_per_update
    cost = Cost(learner, learner.micro_batch_tokens or config.packing.rows * config.packing.row_tokens)
    chips = profile.num_learner_chips or profile.num_engines * profile.chips_per_engine
    pass_s = cost.of(round(num_groups * work.group_tokens), chips) + learner.optimizer_step_s
    export_s = profile.publish.export_s * publishes_per_s(config, num_groups)
    return num_groups / (config.rounds.epochs * pass_s + export_s)


def generate_groups_per_s(config: Config, profile: Profile, work: Workload) -> float:
    """Returns the groups/s that all engines can sample if each always runs what admission and its capacity allow.

    This is an upper bound, because engines are partly empty at the end of a round.
    """
    engine = profile.engine
    places = min(_places(profile, work), responses_in_service(config) / profile.num_engines)
    running, rates = (0.0, *engine.running), (0.0, *engine.tokens_per_s)
    tokens_per_s = max(float(np.interp(h, running, rates)) for h in (places, *(r for r in running if r <= places)))
    prefill_s = work.prompt_tokens * engine.prefill_s_per_token
    request_s = work.response_tokens / tokens_per_s + prefill_s + engine.request_s
    return profile.num_engines / (request_s * work.num_requests)


def _places(profile: Profile, work: Workload) -> float:
    """Returns an engine's capacity in sequences: vLLM's limit or that of the KV cache."""
    engine = profile.engine
    if not engine.kv_capacity_tokens:
        return float(engine.max_num_seqs)
    return min(float(engine.max_num_seqs), max(1.0, engine.kv_capacity_tokens / work.context_tokens))


def responses_in_service(config: Config) -> int:
    """Returns the maximum number of concurrent responses over all engines."""
    if config.admission.policy == "window":
        return config.sequences
    groups = config.admission_width or config.rounds.groups_issued
    return groups * config.rounds.requests_per_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """First bottleneck as a run's pace increases."""

    groups_per_s: float
    """Highest pace without overload, in groups/s; 0 if a resource is overloaded at any pace."""
    part: Resource


def bottleneck(cluster: ClusterModel, *, but: Collection[str] = ()) -> Bottleneck:
    """Returns the lowest pace at which the share of a resource reaches 1, and that resource.

    Shares need not increase with the pace, because actors with full engines ask for fewer tickets. So paces are tried
    from low to high. Resources named in `but` are ignored; learner and engines still limit the pace.
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
"""Maximum share of the store's time for control calls, whose callers wait for each call."""


class StoreQueue:
    """Store queue in virtual time, first come, first served."""

    def __init__(self, config: Config, profile: Profile, store: StoreProfile, calendar: EventQueue) -> None:
        self._calendar, self._store = calendar, store
        self._free_at_s = 0.0
        self.num_groups = 0
        self.spent_s = 0.0
        """Seconds from submission until the learner can read a group, summed over groups."""
        cluster = ClusterModel.of(config, profile)
        self._goes_to_bucket, self._num_puts = cluster.groups_go_to_bucket, cluster.workload.puts_per_group
        # Evaluated at the bottleneck's pace: if that is the store, groups get exactly the time that control calls
        # leave.
        seconds = cluster.store_seconds(store, bottleneck(cluster).groups_per_s)
        control = sum(s for name, s in seconds.items() if name not in (GROUPS, BYTES))
        self._stretch = 1 / (1 - min(control, _MOST_CONTROL))
        """Factor by which interleaved control calls stretch a group's own time."""

    @property
    def mean_s(self) -> float:
        """Mean seconds from submission until the learner can read a group."""
        return self.spent_s / max(1, self.num_groups)

    def put(self, *, num_samples: int, prompt_tokens: int, response_tokens: int, then: Callable[[], None]) -> None:
        """Submits a group; calls `then` when the learner can read it.

        Single samples (admission.unit=sample) count as submitted together with the last one.
        """
        now_s = self._calendar.now_s
        num_bytes = group_bytes(num_samples=num_samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
        took_s = self._num_puts * self._store.group_s
        took_s += 0.0 if self._goes_to_bucket else num_bytes * self._store.byte_s
        self._free_at_s = max(self._free_at_s, now_s) + took_s * self._stretch
        self.num_groups += 1
        self.spent_s += self._free_at_s - now_s
        self._calendar.at(self._free_at_s, then)
