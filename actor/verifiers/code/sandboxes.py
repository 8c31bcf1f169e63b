"""The sandboxes of a verifier's worker: made once, when it loads the verifier; they end with the process."""

import atexit

from actor.sandbox.command import HostView
from actor.sandbox.isolation import check_isolation
from actor.sandbox.limits import MIB, SandboxLimits
from actor.sandbox.pool import Sandbox
from configs.sections import RewardsConfig

_open: dict[tuple[SandboxLimits, HostView], Sandbox] = {}


def limits_of(settings: RewardsConfig) -> SandboxLimits:
    """What a program may have."""
    return SandboxLimits(
        memory_bytes=settings.sandbox_memory_mib * MIB,
        address_space_bytes=2 * settings.sandbox_memory_mib * MIB,
        num_processes=settings.sandbox_processes,
        output_bytes=settings.sandbox_output_mib * MIB,
    )


def view_of(settings: RewardsConfig) -> HostView:
    """Returns the view of the host that programs get."""
    return HostView(packages=settings.package_names)


def sandbox(settings: RewardsConfig) -> Sandbox:
    """This process's, tested once and kept.

    Raises:
      SandboxUnavailableError: this machine can't isolate a program; nothing is run then.
    """
    limits, view = limits_of(settings), view_of(settings)
    if (limits, view) not in _open:
        # Of the machine: what programs that look for a way out need is not what answers may have.
        check_isolation(view=view)
        _open[limits, view] = Sandbox(limits, num_warm=settings.sandbox_warm, view=view)
    return _open[limits, view]


@atexit.register
def close() -> None:
    """Ends them."""
    while _open:
        _open.popitem()[1].close()
