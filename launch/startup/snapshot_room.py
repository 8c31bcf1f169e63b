"""Shared memory that weights take on one machine: the learner's slots, and the copies of actors.

Each host of the learner holds its own rows of a version (`learner.publish.weight_export`), so a host of n holds an n-th
of it. An actor on another machine takes no room here.
"""

import dataclasses
import math

from configs.schema import Config

_SLOTS = 2
"""One that is announced, and one that is being written."""
_DELTA_SHARE = 0.5
"""Largest share of a slot's file that its delta takes (`bridge.snapshots.delta`)."""
_SHARED_COPIES = 2
"""Files that the actors of a machine without the learner download into, in turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotRoom:
    """Room that versions of a run take on one machine, in bytes."""

    served_bytes: float
    """Bytes of a whole version, in the served dtype."""
    num_hosts: int = 1
    """Machines that the learner runs on."""
    num_engines: int = 0
    """Engines on this machine whose actors read the learner's memory; each mirrors a whole version."""

    @property
    def rows_bytes(self) -> float:
        """Bytes of one version that this host of the learner holds."""
        return self.served_bytes / self.num_hosts

    @property
    def least_bytes(self) -> int:
        """Bytes without which a run cannot publish: two slots, and a mirror for each engine of this machine."""
        return math.ceil(_SLOTS * self.rows_bytes + self.num_engines * self.served_bytes)

    def full_bytes(self, config: Config) -> int:
        """Bytes with all that a run may use: a spare slot for slow readers, and a delta beside each slot."""
        slots = _SLOTS + config.publish.has_spare_slot
        has_deltas = config.publish.leaves_the_machine and config.publish.full_every > 1
        per_slot = 1 + _DELTA_SHARE * has_deltas
        return math.ceil(slots * per_slot * self.rows_bytes + self.num_engines * self.served_bytes)


def actor_bytes(served_bytes: float) -> int:
    """Bytes that the actors of a machine without the learner take, together."""
    return math.ceil(_SHARED_COPIES * served_bytes)
