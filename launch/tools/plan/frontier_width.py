"""The frontier's width that an engine's speed asks for (RolloutPipe section 3.3)."""

from configs.schema import Config
from launch.tools.plan.profile import EngineProfile

FULL_SPEED = 0.97
"""Part of the engines' full speed that the frontier must leave them."""


def narrowest_width(config: Config, engine: EngineProfile, *, num_engines: int = 1) -> int:
    """Returns the smallest F_w with T(F_w K / N) >= 0.97 max T: groups, of all N engines together.

    T(h) is an engine's throughput with h sequences. A narrower frontier orders the groups more strictly, but below this
    width the engine is slower, for which no order makes up.
    """
    num_fast = next(
        h for h in range(1, engine.max_num_seqs + 1) if engine.throughput(h) >= FULL_SPEED * full_speed(engine)
    )
    return -(-num_fast * num_engines // config.rounds.requests_per_group)


def full_speed(engine: EngineProfile) -> float:
    """Returns the tokens/s of an engine at the number of sequences that it is fastest with."""
    return max(map(engine.throughput, range(1, engine.max_num_seqs + 1)))


def too_narrow(config: Config, engine: EngineProfile, *, num_engines: int = 1) -> str | None:
    """Returns a message if the frontier keeps engines of a known speed slower than they can be; None if it does not."""
    width = narrowest_width(config, engine, num_engines=num_engines)
    if config.admission.policy != "frontier" or config.admission_width >= width:
        return None
    num_running = min(config.admission_width * config.rounds.requests_per_group / num_engines, engine.max_num_seqs)
    share = engine.throughput(num_running) / full_speed(engine)
    return (
        f"admission.width ({config.admission_width}) keeps {num_running:g} sequences in each engine, which is "
        f"{share:.0%} of its full speed; set admission.width={width}"
    )
