"""Response lengths and latencies drawn beforehand: functions of the prompt, the sample's number and a seed alone.

So every schedule serves the same work, whatever order it serves it in, and a prompt that is tried again has the
lengths it had.
"""

import dataclasses
import hashlib
import math
import statistics
from typing import Literal

import numpy as np
from jaxtyping import Int32

_NORMAL = statistics.NormalDist()
_P75 = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of response lengths in tokens, from 1 to `max_tokens`."""

    kind: Literal["lognormal", "uniform", "tail"]
    """lognormal: long-tailed, clipped at `max_tokens`; uniform: 1 .. max_tokens (PipelineRL, appendix A); tail:
    RollPacker's shape (section 2.2, Figure 2), P75 far below the maximum, most prompts consistently long or short."""
    max_tokens: int
    seed: int = 0
    median: float = 32.0
    """Of a lognormal."""
    prompt_sigma: float = 0.8
    """Of a lognormal: standard deviation of the logarithm of a prompt's own median."""
    sample_sigma: float = 0.3
    """Of lognormal and tail: standard deviation of the logarithm within a prompt."""
    max_over_p75: float = 16.0
    """Of tail: the longest response over the 75th percentile."""
    long_prompts: float = 0.15
    """Of tail: share of the prompts whose responses are all long."""
    stray_samples: float = 0.03
    """Of tail: share of the other prompts' responses that are long all the same."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.kind == "tail" and not (1 - self.long_prompts) * (1 - self.stray_samples) > _P75:
            raise ValueError("a tail's short responses must be more than 75% of all, or its P75 is a long one")

    def tokens(self, prompt_tokens: Int32[np.ndarray, " P"], index: int) -> int:
        """The length of a prompt's response number `index`."""
        prompt = prompt_tokens.astype("<i4").tobytes()
        of_prompt = uniform(prompt, self.seed)
        of_sample = uniform(prompt, self.seed, index + 1)
        return min(self.max_tokens, max(1, round(self._quantile(of_prompt, of_sample, prompt, index))))

    def _quantile(self, of_prompt: float, of_sample: float, prompt: bytes, index: int) -> float:
        if self.kind == "uniform":
            return 0.5 + of_sample * self.max_tokens
        spread = math.exp(self.sample_sigma * _NORMAL.inv_cdf(of_sample))
        if self.kind == "lognormal":
            return self.median * math.exp(self.prompt_sigma * _NORMAL.inv_cdf(of_prompt)) * spread
        is_stray = uniform(prompt, self.seed, -1 - index) < self.stray_samples
        if of_prompt < self.long_prompts or is_stray:
            # From twice the P75 to the maximum, and a third of them at the maximum: what a cap cuts off.
            start = 2 / self.max_over_p75
            return self.max_tokens * (start + (1 - start) * min(1.0, 1.5 * of_sample))
        num_short = (1 - self.long_prompts) * (1 - self.stray_samples)
        p75 = self.max_tokens / self.max_over_p75
        return p75 * spread / math.exp(self.sample_sigma * _NORMAL.inv_cdf(_P75 / num_short))


def uniform(prompt: bytes, *numbers: int) -> float:
    """A uniform number inside (0, 1) that depends on everything given."""
    digest = hashlib.blake2b(prompt + b"".join(n.to_bytes(8, "little", signed=True) for n in numbers), digest_size=8)
    return (int.from_bytes(digest.digest(), "little") + 0.5) / 2**64


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
