"""Held-out evaluation."""

import dataclasses

from configs.checks import not_negative, temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation through the engine that serves the policy."""

    num_problems: int = 256
    """0: no evaluation at all; the publish section's probes, which take held-out problems, must be off too."""
    every_n_steps: int = 50
    """Updates between two evaluations. Also at the start and at the end; 0 only there."""
    temperature: float = 1.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        not_negative("evaluation", num_problems=self.num_problems, every_n_steps=self.every_n_steps)
        if self.temperature != 0:
            temperature("evaluation", self.temperature)
