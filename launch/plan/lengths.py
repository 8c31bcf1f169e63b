"""Draws the lengths of prompts and responses; the same for a problem whenever it is asked."""

import numpy as np

from launch.plan.profiles import LengthProfile

_PROMPTS, _RESPONSES = 0, 1


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


def _draw(profile: LengthProfile, problem: int, num: int, key: tuple[int, ...], attempt: int) -> list[int]:
    if profile.kind == "groups":
        group = profile.groups[problem % len(profile.groups)]
        return [group[i % len(group)] for i in range(num)]
    rng = np.random.default_rng((*key, 1 + attempt))
    if profile.kind == "samples":
        return rng.choice(profile.samples, size=num).tolist()
    if profile.kind == "uniform":
        return rng.integers(profile.min_tokens, profile.max_tokens, endpoint=True, size=num).tolist()
    mean, sigma = profile.log_normal
    share = profile.share_of_prompt
    z = np.sqrt(1 - share) * rng.standard_normal(num)
    if share:
        z += np.sqrt(share) * np.random.default_rng((*key, 0)).standard_normal()
    tokens = np.rint(np.exp(np.minimum(mean + sigma * z, 60.0)))
    return np.clip(tokens, profile.min_tokens, profile.upper).astype(int).tolist()
