"""The optimizer."""

import dataclasses
from typing import Annotated, Literal

from configs.checks import Count, CountOrZero, Fraction, Positive, Range, check_ranges
from configs.sections.model import Dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, with global-norm clipping and linear warm-up."""

    name: Literal["adamw", "adafactor"] = "adamw"
    """adafactor keeps the second moment as rows and columns, and no first one (Shazeer and Stern, 2018)."""
    mu_dtype: Dtype = "float32"
    """What adamw keeps its first moment in."""
    learning_rate: Positive = 1e-6
    """The highest, after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps, rounds.epochs of them an update."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up, over the run's optimizer steps: run.num_updates x rounds.epochs."""
    beta1: Annotated[float, Range(0, 1)] = 0.9
    beta2: Annotated[float, Range(0, 1)] = 0.95
    eps: Fraction = 1e-8
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    max_grad_norm: Positive = 1.0
    max_skipped_in_a_row: Count = 5
    """An optimizer step whose loss or gradient isn't finite changes nothing; after this many one after the other the
    run stops, at the end of the update."""

    def __post_init__(self) -> None:
        check_ranges("optimizer", self)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer betas must be in [0, 1), got {self.beta1} and {self.beta2}")
        if self.name == "adafactor":
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in ("beta1", "beta2", "eps", "mu_dtype") and value != field.default:
                    raise ValueError(
                        f"optimizer.{field.name}={value} has no effect with optimizer.name=adafactor; leave it out"
                    )
