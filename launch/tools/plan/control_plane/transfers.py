"""Transfer time and bytes of a version from the learner's chips to the actor hosts; pure.

Learner hosts write and serve their own rows in parallel, each over its own link. All actor hosts fetch concurrently,
with one download per host. With a bucket, the learner hosts first upload their rows. Transfers overlap with generation:
only loading (`publish.pause_s`) blocks an engine.
"""

import dataclasses
from typing import Literal

from configs.schema import Config
from launch.tools.plan.profile import NetworkProfile, Profile, lowest

Way = Literal["memory", "links", "bucket"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfers:
    """Weight transfers of a run on a cluster."""

    network: NetworkProfile
    way: Way
    """Path of the weights: shared memory, the learner hosts' links, or a bucket."""
    has_bucket: bool
    full_every: int
    """`publish.full_every`; 1 without deltas."""
    num_learner_hosts: int
    num_actor_hosts: int

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "Transfers | None":
        """Derives the transfers of a run; None for a profile without a network.

        Actors prefer the learner's hosts if both exist (`learner/publish/destinations.py`), so a bucket carries their
        downloads only if nothing is served. A learner on the engines' chips runs on the engines' hosts.
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
        """Returns the bytes that an actor host with version `held` fetches for version `number` (from 0)."""
        if self.way == "memory":
            return 0
        has_delta = number % self.full_every != 0 and held == number - 1
        return self.network.delta_bytes if has_delta else self.network.weights_bytes

    @property
    def mean_bytes(self) -> float:
        """Mean bytes per version for an actor host that skips none."""
        if self.way == "memory":
            return 0.0
        full, delta = self.network.weights_bytes, self.network.delta_bytes
        return (full + (self.full_every - 1) * delta) / self.full_every

    @property
    def mean_upload_bytes(self) -> float:
        """Mean bytes per version uploaded to the bucket by all learner hosts: the full version and its delta."""
        if not self.has_bucket:
            return 0.0
        return self.network.weights_bytes + self.network.delta_bytes * (self.full_every - 1) / self.full_every

    @property
    def send_bytes_per_s(self) -> float:
        """Send rate of one learner host, in bytes/s."""
        return lowest(self.network.learner_bytes_per_s, self.network.serve_bytes_per_s)

    @property
    def receive_bytes_per_s(self) -> float:
        """Receive rate of one actor host, in bytes/s."""
        return lowest(self.network.actor_bytes_per_s, self.network.fetch_bytes_per_s)

    def announce_s(self, number: int) -> float:
        """Returns the seconds from the export of version `number` to its announcement, after all hosts have written.

        If a bucket is the only path, this includes the upload.
        """
        full = self.network.weights_bytes
        seconds = full / self.num_learner_hosts / lowest(self.network.write_bytes_per_s)
        if self.way == "bucket":
            delta = self.network.delta_bytes if number % self.full_every else 0
            up = lowest(self.network.learner_bytes_per_s * self.num_learner_hosts, self.network.bucket_bytes_per_s)
            seconds += (full + delta) / up
        return seconds

    def download_s(self, num_bytes: float) -> float:
        """Returns the seconds until all actor hosts, starting together, have `num_bytes` each."""
        all_bytes = self.num_actor_hosts * num_bytes
        own_s = num_bytes / self.receive_bytes_per_s
        if self.way == "links":
            return max(own_s, all_bytes / (self.num_learner_hosts * self.send_bytes_per_s))
        if self.way == "bucket":
            return max(own_s, all_bytes / lowest(self.network.bucket_bytes_per_s))
        return 0.0

    def publish_s(self, number: int, *, held: int) -> float:
        """Returns the seconds from the export until the last actor host has the version, without the notice time."""
        return self.announce_s(number) + self.download_s(self.num_bytes(number, held=held))


def updates_per_publish(config: Config) -> float:
    """Returns the optimizer steps per publish."""
    if config.publish.when == "every":
        return config.publish.every_n_steps
    return config.rounds.groups_per_round / config.rounds.groups_per_update


def publishes_per_s(config: Config, groups_per_s: float) -> float:
    """Returns the publishes/s at `groups_per_s` trained groups/s."""
    return groups_per_s / (config.rounds.groups_per_update * updates_per_publish(config))
