"""When each round of a run was, by the learner's events. Pure."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from launch.report.timeline.events import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """From a round's first ticket until its last weights are out; with weights after every step, R/U updates."""

    number: int
    """From 0."""
    first_step: int
    """Of the updates made in it."""
    last_step: int
    begin_s: float
    """Unix time, as the next."""
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.end_s - self.begin_s


def find_rounds(learner: Sequence[Event], *, updates_per_round: int, by_rounds: bool) -> list[Round]:
    """The rounds that were completed; of one that was trained again after a restart the last time.

    Args:
      learner: the learner's events in order of time, over all of its starts.
      updates_per_round: R / U.
      by_rounds: tickets are issued round by round, and not in a window.
    """
    applied = {int(e.args["step"]): e for e in learner if e.name == "apply" and "step" in e.args}
    published = {int(e.args["step"]): e for e in learner if e.name == "publish" and "step" in e.args}
    issued: dict[int, list[float]] = {}
    for event in learner:
        if event.name == "issue" and "step" in event.args:
            issued.setdefault(int(event.args["step"]), []).append(event.start_s)
    starts = [e.start_s for e in learner if e.name == "restored"]
    found: list[Round] = []
    for number in range(max(applied, default=0) // updates_per_round):
        before, last = number * updates_per_round, (number + 1) * updates_per_round
        if not all(step in applied for step in range(before + 1, last + 1)):
            continue
        first_end_s = applied[before + 1].end_s
        started_s = starts[bisect.bisect_right(starts, first_end_s) - 1] if starts and starts[0] <= first_end_s else 0.0
        previous_s = max(started_s, applied[before].end_s if before in applied else 0.0)
        tickets = [t for t in issued.get(before, []) if previous_s - 1e-3 <= t <= first_end_s]
        fallback_s = previous_s or applied[before + 1].start_s
        begin_s = min(tickets) if tickets and (by_rounds or number == 0) else fallback_s
        end_s = applied[last].end_s
        if last in published and published[last].start_s >= applied[last].start_s:
            end_s = max(end_s, published[last].end_s)
        if end_s > begin_s:
            found.append(Round(number=number, first_step=before + 1, last_step=last, begin_s=begin_s, end_s=end_s))
    return found


def choose_rounds(rounds: Sequence[Round], limit: int) -> list[Round]:
    """At most `limit`, in their order: the first and the last ones, the slowest ones, and evenly between."""
    if len(rounds) <= limit:
        return list(rounds)
    edge = max(1, limit // 8)
    wanted = {*range(edge), *range(len(rounds) - edge, len(rounds))}
    wanted |= set(sorted(range(len(rounds)), key=lambda i: -rounds[i].duration_s)[:edge])
    for i in np.linspace(0, len(rounds) - 1, limit).astype(int).tolist():
        if len(wanted) < limit:
            wanted.add(i)
    return [rounds[i] for i in sorted(wanted)]
