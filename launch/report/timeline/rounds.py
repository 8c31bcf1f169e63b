"""When each round of a run was, by the learner's events. Pure."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from launch.report.timeline.events import Event

_MIN_OPEN_S = 1e-3


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
    is_open: bool = False
    """It is under way, hangs, or was cut off: its end is that of the event log, and `last_step` the last one made."""

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
    applied, published = _by_step(learner, "apply"), _by_step(learner, "publish")
    issued: dict[int, list[float]] = {}
    for event in learner:
        if event.name == "issue" and (step := event.number("step")) is not None:
            issued.setdefault(step, []).append(event.start_s)
    starts = [e.start_s for e in learner if e.name == "restored"]
    found: list[Round] = []
    for number in sorted({(step - 1) // updates_per_round for step in applied if step > 0}):
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


def open_round(
    learner: Sequence[Event], *, updates_per_round: int, by_rounds: bool, extent: tuple[float, float]
) -> Round | None:
    """What came after the last round that was completed; None if nothing did.

    It goes from its first ticket, or from the round before, to the last event of any process: what hangs writes none,
    and others' events and spans that never ended tell of it.

    Args:
      learner: as for `find_rounds`, as the next two.
      updates_per_round: R / U.
      by_rounds: tickets are issued round by round.
      extent: when the first and the last event of any process was, Unix time.
    """
    step, begin_s, started_s = 0, 0.0, 0.0
    for event in learner:  # in order of time: a restart goes back
        match event.name, event.number("step"):
            case "restored", int(found):
                step, started_s = found, event.start_s
                begin_s = event.end_s
            case "restored", _:
                begin_s = started_s = event.start_s
            case "apply", int(found):
                step = found
                begin_s = event.end_s if step % updates_per_round == 0 else begin_s
            case "publish", int(found) if found == step and step % updates_per_round == 0 and event.start_s >= begin_s:
                begin_s = event.end_s
            case _:
                pass
    first = step - step % updates_per_round
    issues = [e.start_s for e in learner if e.name == "issue" and e.number("step") == first]
    tickets = [t for t in issues if t >= max(begin_s, started_s) - 1e-3]
    if tickets and (by_rounds or first == 0):
        begin_s = min(tickets)
    begin_s, end_s = begin_s or extent[0], extent[1]
    if end_s - begin_s < _MIN_OPEN_S:
        return None
    number = first // updates_per_round
    return Round(number=number, first_step=first + 1, last_step=step, begin_s=begin_s, end_s=end_s, is_open=True)


def _by_step(learner: Sequence[Event], name: str) -> dict[int, Event]:
    """The last event of a name for each step that it gives."""
    return {step: e for e in learner if e.name == name and (step := e.number("step")) is not None}


def choose_rounds(rounds: Sequence[Round], limit: int) -> list[Round]:
    """At most `limit`, in their order: the first and the last ones, the slowest ones, and evenly between."""
    if len(rounds) <= limit:
        return list(rounds)
    if limit < 3:
        return [rounds[0], rounds[-1]][-limit:] if limit > 0 else []
    edge = max(1, limit // 8)
    wanted = {*range(edge), *range(len(rounds) - edge, len(rounds))}
    wanted |= set(sorted(range(len(rounds)), key=lambda i: -rounds[i].duration_s)[:edge])
    for i in np.linspace(0, len(rounds) - 1, limit).astype(int).tolist():
        if len(wanted) < limit:
            wanted.add(i)
    return [rounds[i] for i in sorted(wanted)]
