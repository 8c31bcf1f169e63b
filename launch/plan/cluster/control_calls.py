"""What processes ask of the store beside groups: claims, signs of life, looks, and hearing of each change. Pure.

The rates are those of the actor's own code: who is told that there are tickets asks for some at once, if its engine has
room, and looks at what is leased to it; without being told it asks as often as its duties say.
"""

import dataclasses

from actor.duties.changes import GAP_S
from actor.duties.ending import LOOK_S
from actor.duties.leases import LEASED_S
from actor.duties.weights import ANNOUNCED_S
from actor.limits import Limits
from actor.loop import CLAIM_S
from bridge.store.protocol import COUNTED_S
from configs.schema import Config
from launch.plan.cluster.profile import StoreProfile
from launch.plan.cluster.transfers import publishes_per_s

RENEWALS_PER_LEASE = 3
"""`actor/duties/leases.py:keep_leases`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlCalls:
    """Calls a second, of all processes together."""

    claims: float
    writes: float
    reads: float
    rows: float
    """Heartbeats that the store looks at where it counts engines."""
    told: float
    """Changes told, one for each process that hears of it."""

    def seconds(self, store: StoreProfile) -> dict[str, float]:
        """Of the store's time a second, by what it does; the groups' own are not among it."""
        return {
            "claims": self.claims * store.claim_call_s,
            "signs of life": self.writes * store.write_s + self.rows * store.row_s,
            "looks": self.reads * store.read_s,
            "telling of changes": self.told * store.listener_s,
        }


def control_calls(config: Config, *, num_actors: int, groups_per_s: float, share_with_room: float) -> ControlCalls:
    """Of so many actors at so many groups trained a second.

    Args:
      config: the run's.
      num_actors: engines; each has an actor of its own.
      groups_per_s: trained.
      share_with_room: part of the actors whose engines have room for more, so that they ask for tickets.
    """
    by_sample = config.admission.unit == "sample"
    puts = groups_per_s * (config.rounds.samples_per_group if by_sample else 1)
    # A window is topped up as its tickets are claimed, a round issued at once.
    rounds_per_s = groups_per_s / config.rounds.groups_per_round
    offers = groups_per_s if config.publish.when == "every" else rounds_per_s
    publishes = publishes_per_s(config, groups_per_s)
    wakes = min(offers, 1 / GAP_S)
    beats = num_actors / Limits(lease_s=config.actor.lease_s).heartbeat_s
    # Each put lets its actor claim the next; who has room asks when it is told, or as often as CLAIM_S says.
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
