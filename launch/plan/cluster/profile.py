"""What a cluster's store and network can do: measured once, and the planner's input beside the chips'."""

import dataclasses
import math


def _check(section: str, node: "StoreProfile | NetworkProfile", *, least: int, counts: tuple[str, ...]) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{field.name} must be finite and >= 0, got {value}")
        if field.name in counts and value < least:
            raise ValueError(f"{section}.{field.name} must be >= {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreProfile:
    """Seconds of the store's time that calls take when many clients ask at once: one over the calls a second.

    A store serves one run's writes one after the other (`bridge/store/postgres/schema.sql`, `lock_run`), and on one
    server reads take the same cores. So all calls' seconds are added up, and a second has one.
    """

    group_s: float
    """Of a group, or single sample where those are claimed, whatever its size: offered, put, read, acknowledged."""
    byte_s: float = 0.0
    """Of each byte of it on top: sent in, written, read, sent out, encoded and decoded."""
    claim_call_s: float = 0.0
    """Of a claim, which takes the run's lock whether or not it finds a ticket."""
    write_s: float = 0.0
    """Of a small write that waits for no other of the run: a heartbeat, leases renewed."""
    read_s: float = 0.0
    """Of a small read."""
    row_s: float = 0.0
    """Of each row of a read that returns many. Where the store counts engines it looks at as many, and sends none."""
    listener_s: float = 0.0
    """Of telling one more process of a change (LISTEN)."""
    max_connections: int = 0
    """That the server takes, its own among them; 0: no bound."""
    connections_per_process: int = 2
    """Of an actor or learner: one that listens, and one that asks."""
    link_bytes_per_s: float = 0.0
    """Of the server's network, each way; 0: no bound."""

    def __post_init__(self) -> None:
        """Checks the signs."""
        _check("store", self, least=1, counts=("connections_per_process",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """How weights get from learner hosts to actor hosts. A rate of 0 has no bound."""

    weights_bytes: int
    """Of a version in full, in the served dtype."""
    delta_bytes: int = 0
    """Of a version as a delta against the one before; 0: no deltas are made (as with publish.full_every=1)."""
    write_bytes_per_s: float = 0.0
    """That a learner host casts, copies and hashes of its own rows, while training goes on."""
    learner_bytes_per_s: float = 0.0
    """Of one learner host's link, each way."""
    serve_bytes_per_s: float = 0.0
    """That one learner host's snapshot server sends, if the link lets it: with TLS it is bounded by its cores."""
    actor_bytes_per_s: float = 0.0
    """Of one actor host's link, each way."""
    fetch_bytes_per_s: float = 0.0
    """That one actor host takes in and verifies, if the link lets it."""
    bucket_bytes_per_s: float = 0.0
    """Of publish.bucket, all readers together."""
    chips_per_learner_host: int = 1
    engines_per_host: int = 1
    """Those of one host share one download."""

    def __post_init__(self) -> None:
        """Checks the signs and that there is a model."""
        _check("network", self, least=1, counts=("weights_bytes", "chips_per_learner_host", "engines_per_host"))


def lowest(*rates: float) -> float:
    """The lowest of rates of which 0 has no bound; infinity if none has one."""
    return min((r for r in rates if r), default=math.inf)
