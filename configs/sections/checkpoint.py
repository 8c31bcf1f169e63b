"""When the learner saves."""

import dataclasses

from configs.checks import Count, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the learner saves, and how many saves are kept."""

    every_n_steps: Count = 50
    """Updates between two checkpoints. With publish.when=round_end a save that falls due inside a round waits for the
    round's end."""
    keep: Count = 2
    max_failed_in_a_row: Count = 3
    """The run ends when so many saves in a row failed, as on a full disk. Until then training goes on, and the store
    keeps the groups that no checkpoint has."""

    on_stop: bool = True
    """Whether a learner that is told to stop (Ctrl-C, a time limit, a machine that is taken away) saves first.

    By rounds only between a round's end and the next update. What is not saved the next start trains again, from groups
    that the store still has."""

    def __post_init__(self) -> None:
        check_ranges("checkpoint", self)
        if self.keep < 2:
            raise ValueError(
                "checkpoint.keep must be >= 2 (while one is being written, the one before is all there is to fall "
                f"back on), got {self.keep}"
            )
