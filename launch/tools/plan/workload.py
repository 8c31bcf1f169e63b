"""Response lengths, episodes and groups drawn from profiles.

RollPacker's shape (`kind="rollpacker"`) is a lognormal through two quantiles of figure 2, with another sigma above the
upper quantile. Its parameters:

* the median: responses in figure 2 have at most 16k tokens, and the longest is 25 to 32 times the median (section 1),
so the median is 512 to 655; * the 75th percentile: 755 to 1.1k over three tasks (section 2.2); * the end: the longest
response reaches the maximum (section 2.2), so one in a batch of 128 x 8 does.

Each range is replaced by its geometric mean. Median and percentile stay fixed under another max_tokens, and the tail
extends to the maximum. The paper does not give the share of the variance that is due to the prompt.
"""

import dataclasses
import math
import statistics
from typing import Literal

import numpy as np
from jaxtyping import Float

_UNBOUNDED = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """Distribution of prompt or response lengths in tokens.

    * lognormal: median and sigma of the logarithm, clipped at max_tokens; * uniform: min_tokens to max_tokens; *
    rollpacker: RollPacker's figure 2, clipped at max_tokens (parameters in `launch/tools/plan/workload.py`). The
    longest of a batch reaches max_tokens, and a prompt's responses have similar lengths; * samples: drawn from this
    list; * groups: prompt n has the lengths of entry n, cyclically: a replay of a measured workload.
    """

    kind: Literal["lognormal", "uniform", "rollpacker", "samples", "groups"]
    median: float = 0.0
    sigma: float = 0.0
    min_tokens: int = 1
    max_tokens: int = 0
    """Maximum length. 0 means no bound."""
    prompt_share: float | None = None
    """Share of the logarithm's variance due to the prompt; the rest varies between its responses. None means 0.8 for
    rollpacker, else 0."""
    samples: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"lengths: min_tokens must be >= 1, got {self.min_tokens}")
        if self.kind == "lognormal" and not (self.median >= 1 and self.sigma >= 0):
            raise ValueError(f"lengths: lognormal needs median >= 1 and sigma >= 0, got {self.median} and {self.sigma}")
        if self.kind in ("uniform", "rollpacker") and self.max_tokens < self.min_tokens:
            raise ValueError(f"lengths: {self.kind} needs max_tokens >= {self.min_tokens}, got {self.max_tokens}")
        if self.max_tokens and self.max_tokens < self.min_tokens:
            raise ValueError(f"lengths: max_tokens ({self.max_tokens}) is below min_tokens ({self.min_tokens})")
        if self.prompt_share is not None and not 0 <= self.prompt_share <= 1:
            raise ValueError(f"lengths: prompt_share must be in [0, 1], got {self.prompt_share}")
        if self.kind == "samples" and (not self.samples or min(self.samples) < 1):
            raise ValueError("lengths: samples needs a list of lengths >= 1")
        if self.kind == "groups" and (not self.groups or any(not g or min(g) < 1 for g in self.groups)):
            raise ValueError("lengths: groups needs a list of lists of lengths >= 1")

    @property
    def share_of_prompt(self) -> float:
        """`prompt_share` with its default."""
        default = 0.8 if self.kind == "rollpacker" else 0.0
        return default if self.prompt_share is None else self.prompt_share

    @property
    def upper(self) -> int:
        """Maximum length of a response."""
        return self.max_tokens or _UNBOUNDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyProfile:
    """Latency of an environment step: a normal distribution truncated at 0, so its mean may exceed `mean_s`."""

    mean_s: float
    deviation_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.mean_s < math.inf and 0 <= self.deviation_s < math.inf):
            raise ValueError(
                f"episodes.step_s: mean_s and deviation_s must be finite and >= 0, got {self.mean_s} and "
                f"{self.deviation_s}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeProfile:
    """Multi-turn episodes: each turn has `Profile.response_tokens` tokens, followed by an environment step."""

    num_turns: LengthProfile
    step_s: LatencyProfile
    observation_tokens: int = 0
    """Tokens after each turn but the last, which are trained together with the sampled tokens."""
    start_s: float = 0.0
    """Seconds to start an episode on the environments' machine (process, reset). Starts are sequential, so a batch
    waits for its last one."""
    turn_s: float = 0.0
    """Seconds of communication per turn on that machine, in addition to tokens and environment latency."""
    in_lock_step: bool = False
    """True if all episodes in service take their turns and steps in lock step. Sluice never does; it is the baseline of
    environment-level asynchrony."""

    def __post_init__(self) -> None:
        for name in ("observation_tokens", "start_s", "turn_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"episodes.{name} must be finite and >= 0, got {getattr(self, name)}")


FIGURE_2_MEDIAN = math.sqrt(16384 / 32 * 16384 / 25)
FIGURE_2_P75 = math.sqrt(755 * 1100)
FIGURE_2_BATCH = 128 * 8


_PROMPTS, _RESPONSES, _TURNS = 0, 1, 2
_Z_P75 = statistics.NormalDist().inv_cdf(0.75)
_Z_LONGEST = statistics.NormalDist().inv_cdf(1 - 1 / FIGURE_2_BATCH)


class Lengths:
    """Lengths by problem number, in the order in which problems are first issued."""

    def __init__(self, responses: LengthProfile, prompts: LengthProfile, *, seed: int) -> None:
        self._responses, self._prompts, self._seed = responses, prompts, seed

    def prompt(self, problem: int) -> int:
        """Returns the tokens of a problem's prompt."""
        return _draw(self._prompts, problem, 1, (self._seed, _PROMPTS, problem), 0)[0]

    def responses(self, problem: int, num: int, *, attempt: int = 0) -> list[int]:
        """Returns the tokens of `num` responses; another attempt draws other lengths with the same mean."""
        return _draw(self._responses, problem, num, (self._seed, _RESPONSES, problem), attempt)

    def turns(self, problem: int, index: int, num: int, *, attempt: int = 0) -> list[int]:
        """Returns the tokens of the turns of a problem's episode number `index`."""
        return _draw(self._responses, problem, num, (self._seed, _TURNS, problem, index), attempt)


def _draw(profile: LengthProfile, problem: int, num: int, key: tuple[int, ...], attempt: int) -> list[int]:
    if profile.kind == "groups":
        group = profile.groups[problem % len(profile.groups)]
        return [group[i % len(group)] for i in range(num)]
    rng = np.random.default_rng((*key, 1 + attempt))
    if profile.kind == "samples":
        return rng.choice(profile.samples, size=num).tolist()
    if profile.kind == "uniform":
        return rng.integers(profile.min_tokens, profile.max_tokens, endpoint=True, size=num).tolist()
    share = profile.share_of_prompt
    z = np.sqrt(1 - share) * rng.standard_normal(num)
    if share:
        z += np.sqrt(share) * np.random.default_rng((*key, 0)).standard_normal()
    tokens = np.rint(np.exp(np.minimum(_log_tokens(profile, z), 60.0)))
    return np.clip(tokens, profile.min_tokens, profile.upper).astype(int).tolist()


def _log_tokens(profile: LengthProfile, z: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns the logarithm of the length at standard-normal quantiles, for lognormal and rollpacker."""
    if profile.kind == "lognormal":
        return math.log(profile.median) + profile.sigma * z
    body = math.log(FIGURE_2_P75 / FIGURE_2_MEDIAN) / _Z_P75
    # If the body alone exceeds the maximum more than once per batch, lengths are clipped.
    tail = max(body, math.log(profile.max_tokens / FIGURE_2_P75) / (_Z_LONGEST - _Z_P75))
    return math.log(FIGURE_2_P75) + (z - _Z_P75) * np.where(z < _Z_P75, body, tail)
