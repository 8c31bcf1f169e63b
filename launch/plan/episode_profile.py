"""What episodes of several turns are like, for the planner."""

import dataclasses
import math

from launch.plan.length_profile import LengthProfile


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """How long an environment takes to step: normal, of which what is below 0 is left out, so the mean may be above."""

    mean_s: float
    deviation_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the signs."""
        if not (0 <= self.mean_s < math.inf and 0 <= self.deviation_s < math.inf):
            raise ValueError(
                f"episodes.step_s: mean_s and deviation_s must be finite and >= 0, got {self.mean_s} and "
                f"{self.deviation_s}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeProfile:
    """Episodes: of so many turns, of `Profile.response_tokens` each, with an environment's step after each."""

    num_turns: LengthProfile
    step_s: LatencyProfile
    observation_tokens: int = 0
    """After each turn but the last; they are trained beside the sampled ones."""
    start_s: float = 0.0
    """What starting an episode takes of the machine that environments run on: a process, a reset. It does one thing
    after the other, so a batch that begins at once waits for its last."""
    turn_s: float = 0.0
    """What a turn takes of that machine, beside its tokens and the environment's latency: processes that tell each
    other."""
    in_lock_step: bool = False
    """All that are in service take their turn together, and step together: nothing of ours does so, it is what
    environment-level asynchrony is compared with."""

    def __post_init__(self) -> None:
        """Checks the signs."""
        for name in ("observation_tokens", "start_s", "turn_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"episodes.{name} must be finite and >= 0, got {getattr(self, name)}")
