"""Where a version goes besides the learner's own shared memory."""

import dataclasses
from collections.abc import Callable, Sequence

from bridge.published import WeightManifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlet:
    """A way to put versions where other machines can fetch them: a server's table, a bucket."""

    name: str
    """For the log."""
    put: Callable[[WeightManifest], Sequence[str]]
    """Given a version that is whole in shared memory; returns the URLs that it lies under from now on. May raise
    anything. While it is called the version stands still, unless `is_slow`."""
    is_required: bool = False
    """Whether the run ends when it fails. Otherwise that is logged and counted, and the version goes out without it."""
    is_slow: bool = False
    """Whether `put` may take longer than until the next version. It is then called by a thread of its own, for which
    nobody waits, with the newest version alone; it locks what it reads, and raises `SupersededError` where a newer
    version is out already. It is never required."""
