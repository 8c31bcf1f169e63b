"""What the supervisor told of a process: that it died, and how. Pure."""

import re

from launch.processes.cause import LOG_HEAD
from launch.samples.text import visible

_DEATH = re.compile(r"(?P<who>\S+) (?:was killed by signal \d+|ended with code -?\d+|hung \()")
_KILLED = re.compile(
    r"(?P<how>\S+ was killed by signal \d+): (?P<last>.*?)"
    r"(?P<then>(?: \(after \d+ restarts without a new step\))?(?:; starting it again.*|; the run goes on without it)?)",
    re.DOTALL,
)


def dead(line: str) -> str:
    """The process whose death a line of the supervisor tells; empty if it tells none."""
    found = _DEATH.match(line)
    return found["who"] if found else ""


def retold(line: str) -> tuple[str, str]:
    """What happened, and its detail, fit to be shown.

    Who is killed by a signal says nothing of it: the last line of its log is what it did before, and no reason.
    """
    found = _KILLED.fullmatch(line)
    if found is None:
        return visible(line), ""
    last = LOG_HEAD.sub("", found["last"].strip())
    return visible(f"{found['how']}{found['then']}"), visible(f"its last line was: {last}") if last else ""
