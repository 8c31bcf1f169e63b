"""Where a run lives and when it ends."""

import dataclasses
import re

from configs.checks import not_negative, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and when it ends."""

    name: str = "run"
    dir: str = ""
    """The run's folder; empty means runs/<name>. A folder of the same config is resumed."""
    seed: int = 0
    num_updates: int = 100
    """Optimizer steps to train for."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"run.name must be letters, digits, '.', '_' or '-' (it names a folder), got {self.name!r}"
            )
        positive("run", num_updates=self.num_updates)
        not_negative("run", seed=self.seed)
