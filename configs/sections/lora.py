"""Low-rank adapters (LoRA): what is trained instead of the model's own matrices."""

import dataclasses
import math
from typing import Annotated

from configs.checks import Positive, Range, check_ranges

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""A layer's matrices, by their short names; `q` is `q_proj`."""
OF_MLP = ("gate", "up", "down")
MAX_RANK = 512
"""The largest that vLLM serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., 2021): W + s B A is applied, and A [rank, in] and B [out, rank] alone are trained.

    The base W stays as it is in `model.path`; of the adapters alone there are gradients, optimizer state and
    checkpoints.
    """

    rank: Annotated[int, Range(0, MAX_RANK)] = 0
    """0: none, all parameters are trained."""
    alpha: Positive = 32.0
    """The scale: s = alpha / rank."""
    targets: str = "q,k,v,o,gate,up,down"
    """Which of each layer's matrices get one. A mixture of experts has q, k, v and o alone."""
    rank_stabilized: bool = False
    """S = alpha / sqrt(rank) instead (rsLoRA: Kalajdzievski, 2023), for large ranks."""

    def __post_init__(self) -> None:
        check_ranges("lora", self)
        given = self.targets.split(",")
        if unknown := sorted(set(given) - set(TARGETS)):
            raise ValueError(f"lora.targets: no matrix {unknown[0]!r}, wanted some of {','.join(TARGETS)}")
        if len(set(given)) != len(given):
            raise ValueError(f"lora.targets names one twice: {self.targets!r}")
        if not self.is_on:
            self._check_says_nothing()

    def _check_says_nothing(self) -> None:
        """Refuses what only adapters read."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                raise ValueError(
                    f"lora.{field.name}={value} has no effect without lora.rank; give that, or leave it out"
                )

    @property
    def is_on(self) -> bool:
        """Whether adapters are what is trained."""
        return self.rank > 0

    @property
    def modules(self) -> tuple[str, ...]:
        """The matrices that get one, as the model names them, in its order: q_proj, ...; none where it is off."""
        given = self.targets.split(",") if self.is_on else []
        return tuple(f"{target}_proj" for target in TARGETS if target in given)

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
