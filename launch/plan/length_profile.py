"""How many tokens prompts and responses have, for the planner; turns of an episode, too."""

import dataclasses
from typing import Literal

_UNBOUNDED = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """How many tokens prompts or responses have.

    * lognormal: median and sigma of the logarithm, cut at max_tokens;
    * uniform: min_tokens to max_tokens;
    * rollpacker: RollPacker's figure 2, cut at max_tokens (`launch/plan/lengths.py` says which numbers): the longest of
      a batch reaches max_tokens, wherever that is, and a prompt's responses are alike;
    * samples: drawn from this list;
    * groups: prompt n has the lengths of entry n, round and round: a measured workload, replayed.
    """

    kind: Literal["lognormal", "uniform", "rollpacker", "samples", "groups"]
    median: float = 0.0
    sigma: float = 0.0
    min_tokens: int = 1
    max_tokens: int = 0
    """0: no bound."""
    prompt_share: float | None = None
    """Share of the logarithm's variance that is the prompt's; the rest differs between its responses. None: 0.8 for
    rollpacker, else 0."""
    samples: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        """Checks that the kind has what it needs."""
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
        """`prompt_share` with the default filled in."""
        default = 0.8 if self.kind == "rollpacker" else 0.0
        return default if self.prompt_share is None else self.prompt_share

    @property
    def upper(self) -> int:
        """No response is longer."""
        return self.max_tokens or _UNBOUNDED
