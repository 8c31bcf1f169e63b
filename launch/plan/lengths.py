"""Draws the lengths of prompts and responses; the same for a problem whenever it is asked.

RollPacker's shape (`kind="rollpacker"`) is a lognormal through the two quantiles of figure 2, whose sigma is another
one above the upper of them. Which numbers it goes through:

* the median: figure 2 is of 16k tokens at most, and the longest response is 25 to 32 times longer than the median one
  (section 1), so the median is 512 to 655;
* the 75th percentile: 755 to 1.1k over three tasks (section 2.2);
* the end: the longest response reaches the maximum (section 2.2), so one of a batch of 128 x 8 is as long.

Of each range the geometric mean. Median and percentile are the data's and stay where they are under another
max_tokens; how far the tail reaches is the maximum's. How much of the spread is the prompt's the paper doesn't say.
"""

import math
import statistics

import numpy as np
from jaxtyping import Float

from launch.plan.length_profile import LengthProfile

FIGURE_2_MEDIAN = math.sqrt(16384 / 32 * 16384 / 25)
FIGURE_2_P75 = math.sqrt(755 * 1100)
FIGURE_2_BATCH = 128 * 8

_PROMPTS, _RESPONSES, _TURNS = 0, 1, 2
_Z_P75 = statistics.NormalDist().inv_cdf(0.75)
_Z_LONGEST = statistics.NormalDist().inv_cdf(1 - 1 / FIGURE_2_BATCH)


class Lengths:
    """Lengths by problem: 0, 1, ... in the order in which problems are first issued."""

    def __init__(self, responses: LengthProfile, prompts: LengthProfile, *, seed: int) -> None:
        """Draws nothing yet."""
        self._responses, self._prompts, self._seed = responses, prompts, seed

    def prompt(self, problem: int) -> int:
        """Tokens of a problem's prompt."""
        return _draw(self._prompts, problem, 1, (self._seed, _PROMPTS, problem), 0)[0]

    def responses(self, problem: int, num: int, *, attempt: int = 0) -> list[int]:
        """Tokens of `num` responses; another attempt at the same problem draws others that are as long on average."""
        return _draw(self._responses, problem, num, (self._seed, _RESPONSES, problem), attempt)

    def turns(self, problem: int, index: int, num: int, *, attempt: int = 0) -> list[int]:
        """Tokens of the turns of a problem's episode number `index`."""
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
    """Logarithm of the length at quantiles of the standard normal, for lognormal and rollpacker."""
    if profile.kind == "lognormal":
        return math.log(profile.median) + profile.sigma * z
    body = math.log(FIGURE_2_P75 / FIGURE_2_MEDIAN) / _Z_P75
    # A maximum that the body reaches by itself more than once a batch cuts it.
    tail = max(body, math.log(profile.max_tokens / FIGURE_2_P75) / (_Z_LONGEST - _Z_P75))
    return math.log(FIGURE_2_P75) + (z - _Z_P75) * np.where(z < _Z_P75, body, tail)
