"""Partial rollouts (ROLL Flash, section 4.3): what was sampled before a request was ended, and what is left. Pure.

With publish.at_publish=abort_and_resume a weight update ends all requests, and each goes on as a new one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int32

from actor.engine.protocol import Sample
from bridge.types import Finish, Sampling, Version


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of one request, complete or not."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    token_versions: tuple[Version, ...]


def join(parts: Sequence[Part], finish: Finish) -> Sample:
    """One response out of the requests that made it."""
    return Sample(
        tokens=np.concatenate([p.tokens for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        token_versions=tuple(v for p in parts for v in p.token_versions),
        finish=finish,
    )


def rest(
    prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, parts: Sequence[Part]
) -> tuple[Int32[np.ndarray, " Q"], Sampling]:
    """The prompt and the limits of the request that goes on after `parts`.

    Raises:
      ValueError: nothing is left: the parts hold `max_tokens` already.
    """
    num_tokens = sum(p.tokens.size for p in parts)
    left = dataclasses.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_tokens,
        min_tokens=max(0, sampling.min_tokens - num_tokens),
    )
    return np.concatenate([prompt_tokens, *(p.tokens for p in parts)]), left
