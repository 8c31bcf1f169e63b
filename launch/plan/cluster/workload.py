"""What a group is on average: its tokens, its bytes in the store. Drawn from the profile's lengths."""

import dataclasses
import functools

import numpy as np

from configs.schema import Config
from launch.plan.length_profile import LengthProfile
from launch.plan.lengths import Lengths
from launch.plan.profiles import Profile

BYTES_PER_TOKEN = 13
"""Of a response on the wire: token, logprob and version of 4 bytes each, loss mask (`bridge/types.py:Rollout`)."""
BYTES_PER_PROMPT_TOKEN = 4
_BYTES_PER_ROLLOUT, _BYTES_PER_GROUP = 155, 155
"""Names, lengths and the fields that are no arrays, about."""
_NUM_PROBLEMS = 512
"""Drawn for the means."""


def group_bytes(*, num_samples: int, prompt_tokens: float, response_tokens: float) -> float:
    """Of an encoded group whose responses have so many tokens together."""
    arrays = BYTES_PER_TOKEN * response_tokens + BYTES_PER_PROMPT_TOKEN * prompt_tokens
    return arrays + _BYTES_PER_ROLLOUT * num_samples + _BYTES_PER_GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Means."""

    num_samples: int
    """K."""
    num_requests: int
    """Responses sampled for a group: eta_R K."""
    puts_per_group: int
    """Times that something of a group is handed in: once, or each response for itself (admission.unit=sample)."""
    prompt_tokens: float
    response_tokens: float
    """Of one response."""
    context_tokens: float
    """That a running sequence has in the cache at some moment: its prompt and what is there of its response."""

    @classmethod
    def of(cls, config: Config, profile: Profile) -> "Workload":
        """Of a run under a config."""
        rounds = config.rounds
        prompt, mean, square = _moments(profile.response_tokens, profile.prompt_tokens, rounds.samples_per_group)
        return cls(
            num_samples=rounds.samples_per_group,
            num_requests=rounds.requests_per_group,
            puts_per_group=rounds.samples_per_group if config.admission.unit == "sample" else 1,
            prompt_tokens=prompt,
            response_tokens=mean,
            # A long response is met more often, at half of its length on average.
            context_tokens=prompt + square / mean / 2,
        )

    @property
    def group_tokens(self) -> float:
        """Prompts and responses of all K, which is what training costs by."""
        return self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def group_bytes(self) -> float:
        """In the store; where samples are tickets of their own, of all K together."""
        return group_bytes(
            num_samples=self.num_samples,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.num_samples * self.response_tokens,
        )


@functools.lru_cache(maxsize=16)
def _moments(responses: LengthProfile, prompts: LengthProfile, num_samples: int) -> tuple[float, float, float]:
    """(mean prompt, mean response, mean square of a response), in tokens."""
    lengths = Lengths(responses, prompts, seed=0)
    problems = range(_NUM_PROBLEMS)
    tokens = np.array([lengths.responses(n, num_samples) for n in problems], float)
    return float(np.mean([lengths.prompt(n) for n in problems])), float(tokens.mean()), float((tokens**2).mean())
