"""Draws the lengths of prompts and responses; the same for a problem whenever it is asked."""

import numpy as np
from numpy.random import Generator

from launch.plan_profile import LengthProfile


class Lengths:
    """Lengths by problem: 0, 1, ... in the order in which problems are first issued."""

    def __init__(self, responses: LengthProfile, prompts: LengthProfile, *, seed: int) -> None:
        """Draws nothing yet."""
        self._responses, self._prompts, self._seed = responses, prompts, seed

    def prompt(self, problem: int) -> int:
        """Tokens of a problem's prompt."""
        return _draw(self._prompts, problem, 1, self._rng(0, problem), self._rng(1, problem))[0]

    def responses(self, problem: int, num: int, *, attempt: int = 0) -> list[int]:
        """Tokens of `num` responses; another attempt at the same problem draws others that are as long on average."""
        return _draw(self._responses, problem, num, self._rng(2, problem), self._rng(3, problem, attempt))

    def _rng(self, *keys: int) -> Generator:
        return np.random.default_rng((self._seed, *keys))


def _draw(profile: LengthProfile, problem: int, num: int, of_prompt: Generator, of_samples: Generator) -> list[int]:
    if profile.kind == "groups":
        group = profile.groups[problem % len(profile.groups)]
        return [group[i % len(group)] for i in range(num)]
    if profile.kind == "samples":
        return of_samples.choice(profile.samples, size=num).tolist()
    if profile.kind == "uniform":
        return of_samples.integers(profile.min_tokens, profile.max_tokens, endpoint=True, size=num).tolist()
    mean, sigma = profile.log_normal
    share = profile.share_of_prompt
    z = np.sqrt(share) * of_prompt.standard_normal() + np.sqrt(1 - share) * of_samples.standard_normal(num)
    tokens = np.rint(np.exp(np.minimum(mean + sigma * z, 60.0)))
    return np.clip(tokens, profile.min_tokens, profile.upper).astype(int).tolist()
