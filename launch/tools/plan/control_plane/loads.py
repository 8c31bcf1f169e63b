"""Load model: store calls, weight traffic, and group bytes per second.

The rates follow the actor's code. On a ticket notification, an actor with room claims immediately, and reads its
leases. Without notifications it polls at the intervals of its background tasks.

An overloaded link stops nothing, but actors skip versions and the lag increases.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from actor.background import CHANGES_GAP_S, LEASED_S, LOOK_S
from actor.loop import CLAIM_S, ActorLimits
from actor.weight_updates import ANNOUNCED_S
from bridge.snapshots.remote.connection_guard import MAX_CONNECTIONS
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.shard_fetch import num_connections
from bridge.store.store_types import COUNTED_S
from configs.schema import Config
from launch.tools.plan.control_plane.transfers import Transfers, publishes_per_s
from launch.tools.plan.profile import Profile, StoreProfile, lowest
from launch.tools.plan.workload import LengthProfile, Lengths

RENEWALS_PER_LEASE = 3
"""Lease renewals per lease duration, see `actor/background.py:renew_leases`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlCalls:
    """Calls/s of all processes in total."""

    claims: float
    writes: float
    reads: float
    rows: float
    """Heartbeat rows read when the store counts engines."""
    told: float
    """Change notifications, one per receiving process."""

    def seconds(self, store: StoreProfile) -> dict[str, float]:
        """Returns the store seconds per second by kind of call, without groups."""
        return {
            "claims": self.claims * store.claim_call_s,
            "heartbeats": self.writes * store.write_s + self.rows * store.row_s,
            "polling": self.reads * store.read_s,
            "notifications": self.told * store.listener_s,
        }


def control_calls(config: Config, *, num_actors: int, groups_per_s: float, share_with_room: float) -> ControlCalls:
    """Returns the rates, in calls/s, of the store calls of `num_actors` actors while `groups_per_s` groups are trained.

    `share_with_room` is the share of the actors whose engines have room, so that they ask for tickets.
    """
    by_sample = config.admission.unit == "sample"
    puts = groups_per_s * (config.rounds.samples_per_group if by_sample else 1)
    # A window issues one ticket per claim, a round all at once.
    rounds_per_s = groups_per_s / config.rounds.groups_per_round
    offers = groups_per_s if config.publish.when == "every" else rounds_per_s
    publishes = publishes_per_s(config, groups_per_s)
    wakes = min(offers, 1 / CHANGES_GAP_S)
    beats = num_actors / ActorLimits(lease_s=config.actor.lease_s).heartbeat_s
    # Each put lets the actor claim again. An actor with room claims on notification, or every CLAIM_S.
    claims = puts + num_actors * share_with_room * max(wakes, 1 / CLAIM_S)
    looks = max(wakes, 1 / LEASED_S) + max(publishes, 1 / ANNOUNCED_S) + 1 / LOOK_S
    counts = min(beats, 1 / COUNTED_S)
    return ControlCalls(
        claims=claims,
        writes=beats + num_actors * RENEWALS_PER_LEASE / config.actor.lease_s + counts,
        reads=num_actors * looks + beats,
        rows=counts * num_actors,
        told=(num_actors + 1) * (offers + 2 * puts + publishes),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """Load and capacity of a resource at some pace of the run."""

    name: str
    load: float
    capacity: float
    unit: str
    remedy: str
    made_of: tuple[tuple[str, float], ...] = ()
    """Parts of the load by cause."""

    @property
    def share(self) -> float:
        """Load over capacity; overloaded from 1."""
        return self.load / self.capacity

    @property
    def mostly(self) -> str:
        """Cause of the largest part of the load; empty if there is only one."""
        return max(self.made_of, key=lambda item: item[1])[0] if self.made_of else ""

    @property
    def full_name(self) -> str:
        """Name with the cause of the largest part of the load."""
        return f"{self.name}: {self.mostly}" if self.made_of else self.name


GROUPS, BYTES = "groups", "groups' bytes"
BESIDES = 10
"""Additional connections: 3 that PostgreSQL reserves for superusers, plus administrators and long calls."""
_REMEDIES = {
    GROUPS: "a faster server (commits/s), or whole groups instead of single samples (admission.unit=group)",
    BYTES: "groups to a bucket (store.bucket)",
    "claims": "fewer and larger engines (chips_per_engine), or a faster server",
    "heartbeats": "fewer and larger engines (chips_per_engine), or a faster server (commits/s)",
    "polling": "fewer and larger engines (chips_per_engine), or a server with more cores",
    "notifications": "fewer and larger engines (chips_per_engine): every engine receives every notification",
}


def store_parts(
    store: StoreProfile, *, seconds: Mapping[str, float], stored_bytes_per_s: float, num_actors: int
) -> list[Resource]:
    """Returns the resources of one store.

    `seconds` are store seconds per second, by kind of call; `num_actors` does not count the learner.
    """
    most = max(seconds, key=lambda name: seconds[name])
    made = [
        Resource(
            name="store",
            load=sum(seconds.values()),
            capacity=1.0,
            unit="s/s",
            remedy=_REMEDIES[most],
            made_of=tuple(seconds.items()),
        )
    ]
    if store.link_bytes_per_s:
        made.append(
            Resource(
                name="store's link",  # each direction carries the groups once: from actors and to the learner
                load=stored_bytes_per_s,
                capacity=store.link_bytes_per_s,
                unit="B/s",
                remedy=_REMEDIES[BYTES] + ", or a faster link",
            )
        )
    if store.max_connections:
        needed = connections_of(store, num_actors=num_actors)
        made.append(
            Resource(
                name="store's connections",
                load=needed,
                capacity=store.max_connections,
                unit="connections",
                remedy=f"max_connections={needed} on the server, or fewer and larger engines (chips_per_engine)",
            )
        )
    return made


def connections_of(store: StoreProfile, *, num_actors: int) -> int:
    """Returns the required `max_connections` of a server for `num_actors` actors and a learner."""
    return (num_actors + 1) * store.connections_per_process + BESIDES


_LESS = "deltas (publish.full_every), fewer versions (publish.every_n_steps)"


def weight_parts(transfers: Transfers, publishes_per_s: float) -> list[Resource]:
    """Returns the resources of weight transfers at a publish rate, without unbounded ones."""
    made = [
        _writing(transfers, publishes_per_s),
        _learner_links(transfers, publishes_per_s),
        _actor_links(transfers, publishes_per_s),
        _bucket(transfers, publishes_per_s),
    ]
    if transfers.way == "links":
        made.append(_server_connections(transfers))
    return [part for part in made if part.capacity < math.inf]


def _writing(transfers: Transfers, publishes_per_s: float) -> Resource:
    return Resource(
        name="learner hosts' writing",
        load=publishes_per_s * transfers.network.weights_bytes / transfers.num_learner_hosts,
        capacity=lowest(transfers.network.write_bytes_per_s),
        unit="B/s per host",
        remedy="more learner hosts, fewer versions (publish.every_n_steps)",
    )


def _learner_links(transfers: Transfers, publishes_per_s: float) -> Resource:
    uploads = publishes_per_s * transfers.mean_upload_bytes / transfers.num_learner_hosts
    if transfers.way == "bucket":
        # An upload does not use the snapshot server.
        return Resource(
            name="learner hosts' links",
            load=uploads,
            capacity=lowest(transfers.network.learner_bytes_per_s),
            unit="B/s per host",
            remedy="more learner hosts, fewer versions (publish.every_n_steps)",
        )
    downloads = publishes_per_s * transfers.mean_bytes * transfers.num_actor_hosts / transfers.num_learner_hosts
    return Resource(
        name="learner hosts' links",
        load=downloads + uploads,
        capacity=transfers.send_bytes_per_s,
        unit="B/s per host",
        remedy=f"{_LESS}, more learner hosts, or a bucket instead of the links "
        "(publish.bucket with publish.serve=none)",
        made_of=(("downloads", downloads), ("uploads", uploads)) if uploads else (),
    )


def _actor_links(transfers: Transfers, publishes_per_s: float) -> Resource:
    return Resource(
        name="actor hosts' links",
        load=publishes_per_s * transfers.mean_bytes,
        capacity=transfers.receive_bytes_per_s,
        unit="B/s per host",
        remedy=f"{_LESS}, or faster links",
    )


def _bucket(transfers: Transfers, publishes_per_s: float) -> Resource:
    num_readers = transfers.num_actor_hosts if transfers.way == "bucket" else 0
    a_version = transfers.mean_upload_bytes + transfers.mean_bytes * num_readers
    return Resource(
        name="weights' bucket",
        load=publishes_per_s * a_version,
        capacity=lowest(transfers.network.bucket_bytes_per_s) if transfers.has_bucket else math.inf,
        unit="B/s",
        remedy=f"{_LESS}, or more engines per host",
    )


def _server_connections(transfers: Transfers) -> Resource:
    # Each concurrent range read is one connection; a reader's connections are spread over the learner's hosts.
    return Resource(
        name="snapshot servers' connections",
        load=transfers.num_actor_hosts * num_connections(transfers.num_learner_hosts, RetryPolicy()),
        capacity=MAX_CONNECTIONS * transfers.num_learner_hosts,
        unit="connections",
        remedy="more learner hosts, more engines per host, or a bucket instead of the links "
        "(publish.bucket with publish.serve=none)",
    )


BYTES_PER_TOKEN = 13
"""Bytes per response token on the wire: token, logprob and version of 4 bytes each, and loss mask (`Rollout`)."""
BYTES_PER_PROMPT_TOKEN = 4
_BYTES_PER_ROLLOUT, _BYTES_PER_GROUP = 155, 155
"""Approximate bytes of names, lengths and non-array fields."""
_NUM_PROBLEMS = 512


def group_bytes(*, num_samples: int, prompt_tokens: float, response_tokens: float) -> float:
    """Returns the bytes of an encoded group with `response_tokens` tokens in total."""
    arrays = BYTES_PER_TOKEN * response_tokens + BYTES_PER_PROMPT_TOKEN * prompt_tokens
    return arrays + _BYTES_PER_ROLLOUT * num_samples + _BYTES_PER_GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean sizes of a run's groups."""

    num_samples: int
    """Samples per group, K."""
    num_requests: int
    """Responses sampled per group, eta_R K."""
    puts_per_group: int
    """Submissions per group: 1, or one per response (admission.unit=sample)."""
    prompt_tokens: float
    response_tokens: float
    """Sampled tokens per response, of all its turns."""
    observed_tokens: float
    """Tokens of an environment per response."""
    context_tokens: float
    """Mean tokens of a running sequence in the cache: its prompt and its partial response."""

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "Workload":
        """Derives the workload of a run."""
        rounds = config.rounds
        num_samples, num_turns, observation = rounds.samples_per_group, 1.0, 0
        prompt, mean, square = _moments(profile.response_tokens, profile.prompt_tokens, num_samples)
        if (episodes := profile.episodes) is not None:
            num_turns = _moments(episodes.num_turns, profile.prompt_tokens, num_samples)[1]
            observation = episodes.observation_tokens
        return cls(
            num_samples=num_samples,
            num_requests=rounds.requests_per_group,
            puts_per_group=num_samples if config.admission.unit == "sample" else 1,
            prompt_tokens=prompt,
            response_tokens=num_turns * mean,
            observed_tokens=(num_turns - 1) * observation,
            # At a random moment long responses are more frequent, half done on average, and after half of the turns.
            context_tokens=prompt + (num_turns - 1) / 2 * (mean + observation) + square / mean / 2,
        )

    @property
    def group_tokens(self) -> float:
        """Prompt, response and observed tokens of all K samples, as trained."""
        return self.num_samples * (self.prompt_tokens + self.response_tokens + self.observed_tokens)

    @property
    def group_bytes(self) -> float:
        """Bytes of a group in the store, summed over all K samples if they are separate tickets."""
        return group_bytes(
            num_samples=self.num_samples,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.num_samples * (self.response_tokens + self.observed_tokens),
        )


@functools.lru_cache(maxsize=16)
def _moments(responses: LengthProfile, prompts: LengthProfile, num_samples: int) -> tuple[float, float, float]:
    """Returns (mean prompt, mean response, mean squared response), in tokens."""
    lengths = Lengths(responses, prompts, seed=0)
    problems = range(_NUM_PROBLEMS)
    tokens = np.array([lengths.responses(n, num_samples) for n in problems], float)
    return float(np.mean([lengths.prompt(n) for n in problems])), float(tokens.mean()), float((tokens**2).mean())
