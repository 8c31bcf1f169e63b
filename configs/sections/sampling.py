"""How the actors sample."""

import dataclasses

from configs.checks import Count, CountOrZero, Finite, Fraction, check_ranges, temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the actors sample."""

    max_response_tokens: Count = 16
    """Tokens that a response, or a turn of an episode, may have."""
    temperature: Finite = 1.0
    top_p: Fraction = 1.0
    top_k: CountOrZero = 0

    def __post_init__(self) -> None:
        check_ranges("sampling", self)
        temperature("sampling", self.temperature)  # 0 too is refused: a greedy choice has no ratio
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k must stay 1.0 and 0: importance ratios need the learner's "
                f"distribution truncated alike, got top_p={self.top_p} top_k={self.top_k}"
            )
