"""The number of files that a process may have open: raised as far as the system allows, and refused where too few.

A process inherits two limits: a soft one, which it may raise up to the hard one. An engine, a store and a server of
weights have hundreds of files and connections open, more than some systems' soft limit.
"""

import contextlib
import resource

MIN_FILES = 128
"""Least hard limit with which a learner and an engine start."""
_ENOUGH = 1024
"""Hard limit below which many engines, environments or connections may not fit."""
_MOST = 2**20
"""Highest soft limit set: some programs take time for each file that might be open."""


def raise_open_files() -> None:
    """Raises this process's soft limit to the hard one; processes that it starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_open_files() -> list[str]:
    """Returns what to know of the limit.

    Raises:
      ValueError: it is too low for a run.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _ENOUGH:
        return []
    said = f"a process may have {limit} files open (ulimit -n)"
    how = "raise the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)"
    if limit < MIN_FILES:
        raise ValueError(f"{said}, a learner and an engine need at least {MIN_FILES}: {how}")
    return [f"warning: {said}: many engines, environments or connections may run out of them; {how}"]
