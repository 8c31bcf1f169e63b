"""The learner's processes."""

import dataclasses

from configs.checks import Count, WholeSeconds, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How many processes the learner is, and when one of them is taken to be lost. May differ when a run goes on."""

    num_processes: Count = 1
    """Learner processes that launch.local starts on this machine; each has all that `mesh.devices` gives it."""
    join_s: WholeSeconds = 300
    """How long the learner's processes wait for each other at the start."""
    silence_s: WholeSeconds = 15
    """A process of several that gives no sign of life for so long is taken to be dead: all end, and start again."""

    def __post_init__(self) -> None:
        check_ranges("learner", self)
