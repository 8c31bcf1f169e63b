"""What is kept of the text of a run."""

import dataclasses

from configs.checks import Count, CountOrZero, Positive, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Which groups are kept as text in samples.jsonl; nothing of it changes what is trained."""

    groups_per_round: CountOrZero = 4
    """Trained groups of each round, spread over it in the order in which they are trained; 0: none."""
    eval_problems: CountOrZero = 16
    """Problems of each evaluation, always the same ones; 0: none."""
    responses: Count = 8
    """Of a group at most; the best, the worst and what lies evenly between."""
    chars: Count = 4000
    """Of a prompt or a response at most; a longer one is cut in its middle."""
    max_mib: Positive = 64.0
    """Size of the file in MiB; what would be more thins its older half, again and again, and leaves each set's first
    evaluation, while these take a quarter of it at most."""

    def __post_init__(self) -> None:
        check_ranges("samples", self)
        if self.chars < 100:
            raise ValueError(f"samples.chars must be at least 100, got {self.chars}")
