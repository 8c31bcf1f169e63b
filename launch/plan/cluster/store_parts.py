"""The store as a part of a run: its time, its link, its connections."""

from collections.abc import Mapping

from launch.plan.cluster.part import Part
from launch.plan.cluster.profile import StoreProfile

GROUPS, BYTES = "groups", "groups' bytes"
BESIDES = 10
"""Connections besides: 3 that PostgreSQL keeps for superusers, who looks on, and calls that take long."""
_REMEDIES = {
    GROUPS: "a faster server (commits a second), or whole groups in place of single samples (admission.unit=group)",
    BYTES: "groups to a bucket (store.bucket, store.inline_bytes)",
    "claims": "fewer and larger engines (chips_per_engine), or a faster server",
    "signs of life": "fewer and larger engines (chips_per_engine), or a faster server (commits a second)",
    "looks": "fewer and larger engines (chips_per_engine), or a server with more cores",
    "telling of changes": "fewer and larger engines (chips_per_engine): each hears of every change",
}


def store_parts(
    store: StoreProfile, *, seconds: Mapping[str, float], stored_bytes_per_s: float, num_actors: int
) -> list[Part]:
    """Of one store.

    Args:
      store: what it can do.
      seconds: of its time a second, by what it does.
      stored_bytes_per_s: of groups that go through it.
      num_actors: that are connected, besides a learner.
    """
    most = max(seconds, key=lambda name: seconds[name])
    made = [
        Part(
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
            Part(
                name="store's link",  # what comes in goes out to the learner, the link's other way
                load=stored_bytes_per_s,
                capacity=store.link_bytes_per_s,
                unit="B/s",
                remedy=_REMEDIES[BYTES] + ", or a faster link",
            )
        )
    if store.max_connections:
        needed = connections_of(store, num_actors=num_actors)
        made.append(
            Part(
                name="store's connections",
                load=needed,
                capacity=store.max_connections,
                unit="connections",
                remedy=f"max_connections={needed} on the server, or fewer and larger engines (chips_per_engine)",
            )
        )
    return made


def connections_of(store: StoreProfile, *, num_actors: int) -> int:
    """What a server's `max_connections` is to be for so many actors and a learner."""
    return (num_actors + 1) * store.connections_per_process + BESIDES
