"""When a process that lives is taken to hang."""

import dataclasses

from configs.checks import Seconds, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisionConfig:
    """When a process that lives is taken to hang; it is killed then, with all that it started, and started again.

    Every time is one in which its watcher was running itself, so neither a set clock nor a suspended machine makes a
    healthy process look hung. They may differ when a run is continued.
    """

    heartbeat_s: Seconds = 30.0
    """No heartbeat of a learner or an actor for so long, or a process of an engine that was stopped for so long."""
    first_heartbeat_s: Seconds = 120.0
    """The same for a process that was started just now and has not beaten yet."""
    start_s: Seconds = 1800.0
    """A learner that beats, and gets no part of its start done for so long: reading weights, restoring a checkpoint,
    and whatever it compiles up to its first update. An actor's bound is actor.start_timeout_s."""
    work_s: Seconds = 600.0
    """A learner that beats, and neither gets a part of its work done (a micro-batch, an update, a publish, a
    checkpoint) nor waits for others, for so long."""
    engine_s: Seconds = 120.0
    """An engine that has requests and samples no token for so long, weight updates aside; an actor that beats, and
    whose loop does not turn for so long."""
    swap_s: Seconds = 120.0
    """A weight update that takes an engine longer."""
    stop_s: Seconds = 120.0
    """How long a learner that is told to stop may take to end before it is killed: its micro-batch or update under way,
    and the save of checkpoint.on_stop. On a cluster launch.deploy sets it to --grace_s."""

    def __post_init__(self) -> None:
        check_ranges("supervision", self)

    @property
    def lock_wait_s(self) -> float:
        """How long a process waits for a lock: another one that was stopped with it is found and killed meanwhile."""
        return 4 * self.heartbeat_s
