"""An actor's bounds of time and number; how large its engine is says `actor.engine.limits.EngineLimits`."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take, in seconds, and how often they are tried."""

    lease_s: float
    max_attempts: int = 3
    """How often a ticket is tried whose responses can't be judged."""
    heartbeat_s: float = 2.0
    swap_s: float = 120.0
    """A weight update that takes longer has hung."""
    stall_s: float = 120.0
    """An engine with requests that samples no token for so long, weight updates aside, has hung."""
    max_unstored_groups: int = 64
    """Groups that are sampled and that the store doesn't have yet, from which on nothing is begun: it is away, or slow,
    or verifiers are."""
