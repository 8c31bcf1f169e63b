"""Shared memory for weights on one machine: the learner's slots and the actors' copies.

Each of the learner's n hosts holds only its own rows, 1/n of a version (`learner.publish.weight_export`). Actors on
other machines use no memory here.
"""

import dataclasses
import math

from configs.schema import Config

_SLOTS = 2
"""Snapshot slots: one announced, one being written."""
_DELTA_SHARE = 0.5
"""Maximum size of a slot's delta as a share of its file (`bridge.snapshots.delta`)."""
_SHARED_COPIES = 2
"""Files that the actors of a machine without the learner download into, alternately."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotRoom:
    """Shared memory of a run's versions on one machine."""

    served_bytes: float
    """Bytes of a whole version, in the served dtype."""
    num_hosts: int = 1
    """Machines of the learner."""
    num_engines: int = 0
    """Engines on this machine whose actors read the learner's memory; each mirrors a whole version."""
    helper_bytes: float = 0.0
    """A gradient helper's copy of a version, and the sums that it hands over."""

    @property
    def rows_bytes(self) -> float:
        """Bytes of one version held by this host of the learner."""
        return self.served_bytes / self.num_hosts

    @property
    def least_bytes(self) -> int:
        """Minimum bytes for publishing: two slots, and one mirror per engine of this machine."""
        own_bytes = self.num_engines * self.served_bytes + self.helper_bytes
        return math.ceil(_SLOTS * self.rows_bytes + own_bytes)

    def full_bytes(self, config: Config) -> int:
        """Returns the maximum bytes that a run may use, with a spare slot for slow readers and a delta per slot."""
        slots = _SLOTS + config.publish.has_spare_slot
        has_deltas = config.publish.leaves_the_machine and config.publish.full_every > 1
        per_slot = 1 + _DELTA_SHARE * has_deltas
        own_bytes = self.num_engines * self.served_bytes + self.helper_bytes
        return math.ceil(slots * per_slot * self.rows_bytes + own_bytes)


def helper_bytes(config: Config, *, served_bytes: float, num_params: float) -> float:
    """Returns the bytes of a gradient helper's copy of a version and of the sums that it hands over, in float32."""
    return served_bytes + 4 * num_params if config.helpers.num_engines else 0.0


def actor_bytes(served_bytes: float) -> int:
    """Returns the bytes used in total by the actors of a machine without the learner."""
    return math.ceil(_SHARED_COPIES * served_bytes)
