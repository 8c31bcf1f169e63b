"""When the learner saves."""

import dataclasses

from configs.checks import positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the learner saves, and how many saves are kept."""

    every_n_steps: int = 50
    """With publish.when=round_end a save that falls due inside a round waits for the round's end."""
    keep: int = 2

    def __post_init__(self) -> None:
        positive("checkpoint", every_n_steps=self.every_n_steps)
        if self.keep < 2:
            raise ValueError(
                "checkpoint.keep must be >= 2 (while one is being written, the one before is all there is to fall "
                f"back on), got {self.keep}"
            )
