"""How long a version takes from the learner's chips to the actors' hosts, and how many bytes it is. Pure.

Learner hosts write their own rows side by side, and serve them side by side, each over its own link; all actor hosts
fetch at the same time, one download for the engines of a host; out of a bucket, the learner hosts put their rows there
first. It all runs beside generation: only the load, which the profile measures as `publish.pause_s`, stops an engine.
"""

import dataclasses
from typing import Literal

from configs.schema import Config
from launch.tools.plan.profile import NetworkProfile, Profile, lowest

Way = Literal["memory", "links", "bucket"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfers:
    """Of one run on one cluster."""

    network: NetworkProfile
    way: Way
    """Shared memory, the learner hosts' own links, or a bucket."""
    has_bucket: bool
    full_every: int
    """As `publish.full_every`; 1 without deltas."""
    num_learner_hosts: int
    num_actor_hosts: int

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "Transfers | None":
        """None for a profile without a network: what it measured of a publish is all there is to it.

        Actors ask the learner's hosts first where both are there (`learner/publish/destinations.py`), so a bucket
        carries their downloads only where nothing is served. A learner on the engines' chips is on the engines' hosts.
        """
        if (network := profile.network) is None:
            return None
        publish = config.publish
        way: Way = "links" if publish.serve != "none" else "bucket" if publish.bucket else "memory"
        chips = profile.num_learner_chips or profile.num_engines * profile.chips_per_engine
        return cls(
            network=network,
            way=way,
            has_bucket=bool(publish.bucket),
            full_every=publish.full_every if network.delta_bytes and way != "memory" else 1,
            num_learner_hosts=-(-chips // network.chips_per_learner_host),
            num_actor_hosts=-(-profile.num_engines // network.engines_per_host),
        )

    def num_bytes(self, number: int, *, held: int) -> int:
        """That an actor host fetches of the `number`-th version (from 0) when it holds the `held`-th."""
        if self.way == "memory":
            return 0
        has_delta = number % self.full_every != 0 and held == number - 1
        return self.network.delta_bytes if has_delta else self.network.weights_bytes

    @property
    def mean_bytes(self) -> float:
        """Of a version, over many, for an actor host that misses none."""
        if self.way == "memory":
            return 0.0
        full, delta = self.network.weights_bytes, self.network.delta_bytes
        return (full + (self.full_every - 1) * delta) / self.full_every

    @property
    def mean_upload_bytes(self) -> float:
        """That all learner hosts together put into the bucket of a version: it in full, and its delta."""
        if not self.has_bucket:
            return 0.0
        return self.network.weights_bytes + self.network.delta_bytes * (self.full_every - 1) / self.full_every

    @property
    def send_bytes_per_s(self) -> float:
        """Of one learner host."""
        return lowest(self.network.learner_bytes_per_s, self.network.serve_bytes_per_s)

    @property
    def receive_bytes_per_s(self) -> float:
        """Of one actor host."""
        return lowest(self.network.actor_bytes_per_s, self.network.fetch_bytes_per_s)

    def announce_s(self, number: int) -> float:
        """From the export of the `number`-th version to its announcement: every learner host has written its rows.

        Where a bucket is the only way, until it is there.
        """
        full = self.network.weights_bytes
        seconds = full / self.num_learner_hosts / lowest(self.network.write_bytes_per_s)
        if self.way == "bucket":
            delta = self.network.delta_bytes if number % self.full_every else 0
            up = lowest(self.network.learner_bytes_per_s * self.num_learner_hosts, self.network.bucket_bytes_per_s)
            seconds += (full + delta) / up
        return seconds

    def download_s(self, num_bytes: float) -> float:
        """Until all actor hosts, which begin at once, have so many bytes each."""
        all_bytes = self.num_actor_hosts * num_bytes
        own_s = num_bytes / self.receive_bytes_per_s
        if self.way == "links":
            return max(own_s, all_bytes / (self.num_learner_hosts * self.send_bytes_per_s))
        if self.way == "bucket":
            return max(own_s, all_bytes / lowest(self.network.bucket_bytes_per_s))
        return 0.0

    def publish_s(self, number: int, *, held: int) -> float:
        """From the export to the last actor host's having it whole, without the time to notice it."""
        return self.announce_s(number) + self.download_s(self.num_bytes(number, held=held))


def updates_per_publish(config: Config) -> float:
    """Optimizer steps from one publish to the next."""
    if config.publish.when == "every":
        return config.publish.every_n_steps
    return config.rounds.groups_per_round / config.rounds.groups_per_update


def publishes_per_s(config: Config, groups_per_s: float) -> float:
    """At so many groups trained a second."""
    return groups_per_s / (config.rounds.groups_per_update * updates_per_publish(config))
