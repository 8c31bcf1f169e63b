"""The learner's processes."""

import dataclasses

from configs.checks import Count, Fraction, WholeSeconds, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How many processes the learner is, and when one of them is taken to be lost. May differ when a run goes on."""

    num_processes: Count = 1
    """Learner processes that launch.local starts on this machine; each has all that `mesh.devices` gives it."""
    join_s: WholeSeconds = 300
    """How long the learner's processes wait for each other at the start."""
    silence_s: WholeSeconds = 60
    """Time without a sign of life after which a process of several is taken to be dead, in seconds: all end, and start
    again. Above the longest pause of a network or a host that is no failure."""
    gpu_memory_fraction: Fraction = 0.75
    """Share of each GPU's memory that the learner reserves at the start. On a GPU that an engine has too, it must leave
    room for `actor.gpu_memory_utilization`: at most 0.95 together. No effect on TPU and CPU."""

    def __post_init__(self) -> None:
        check_ranges("learner", self)
