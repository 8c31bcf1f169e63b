"""What an episode on the rig is: turns of a given length, and latencies drawn beforehand.

Latencies are a function of the prompt, the sample's number, the turn and a seed, and of nothing else, so every schedule
has the same work.
"""

import dataclasses
import statistics

import numpy as np
from jaxtyping import Int32

from tests.bench.rig.lengths import uniform

_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What an episode is."""

    environment: str
    """`module:Class`; its rows say `latencies_s`, one a turn."""
    num_turns: int
    turn_tokens: int
    """Sampled in each turn."""
    mean_s: float
    deviation_s: float
    """Of the environment's latency: normal, of which what is below 0 is left out."""
    seed: int = 0
    lock_step: int = 0
    """Episodes of a batch that all take their turns, and step, together; 0: each goes on for itself."""

    def latencies_s(self, prompt_tokens: Int32[np.ndarray, " P"], index: int) -> list[float]:
        """Of a prompt's episode number `index`, one a turn."""
        if self.deviation_s == 0:
            return [self.mean_s] * self.num_turns
        prompt = prompt_tokens.astype("<i4").tobytes()
        below = _NORMAL.cdf(-self.mean_s / self.deviation_s)
        return [
            self.mean_s
            + self.deviation_s * _NORMAL.inv_cdf(below + (1 - below) * uniform(prompt, self.seed, index, turn))
            for turn in range(self.num_turns)
        ]
