"""Rounds and faults of a run on the time axis."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.tools.report import run_data
from launch.tools.report.run_data import RunData
from launch.tools.report.timeline_events import SUPERVISOR, Event, role_of, supervisor_message
from launch.tools.samples.samples_view import visible

MAX_SHOWN = 300
_SAYS = {
    "restored": "learner resumed from its checkpoint",
    "ess stop": "update not applied: effective sample size below the floor",
    "fence": "actor fenced: its groups are rejected",
    "unfence": "fence lifted: the actor's groups are accepted again",
    "fenced": "actor noticed its fence",
    "unfenced": "actor noticed that its fence is lifted",
    "refused": "weight version rejected",
    "abandoned": "groups of an abandoned branch dropped",
    "started over": "actor loaded the weights of a restarted learner",
    "dropped": "group dropped",
    "events lost": "event log lost events: disk full",
}
"""Descriptions of instant events that report a fault."""
_COUNTS = {
    "skipped_updates": "updates skipped: loss or gradient not finite",
    "ess_stops": "updates not applied: effective sample size below the floor",
    "checkpoint/failed": "failed checkpoint saves",
    "actor/verifier_failures": "failed or hung verifier calls",
    "actor/episode_failures": "failed or hung environments",
    "actor/dropped_groups": "groups failed because a response was not scored",
    "actor/judge_failures": "responses not scored by the judge",
    "groups/unreadable": "unreadable groups",
    "publish/destination_failures": "failed writes of a version to a bucket",
}
"""Descriptions of cumulative metrics that are 0 without faults."""
_MAX_DETAIL = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run."""

    time_s: float
    """Unix time in seconds."""
    process: str
    what: str
    detail: str
    times: int = 1
    """Number of consecutive occurrences, whose details may differ."""
    last_s: float = 0.0
    """Time of the last occurrence, Unix time in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of a run."""

    happened: list[Fault]
    """Faults by time, with repetitions merged; the first `MAX_SHOWN`."""
    num_happened: int
    """Number of all faults."""
    num_shown: int
    """Number of faults covered by `happened`."""
    counts: list[tuple[str, float]]
    """Description and count of faults without events."""
    restarts: dict[str, int]


def find_faults(run: RunData, instants: Mapping[str, Sequence[Event]]) -> Faults:
    """Collects the faults of a run; `instants` are its instant events by process."""
    found: list[Fault] = []
    restarts: dict[str, int] = {}
    for process, events in instants.items():
        role, number = role_of(process)
        if number:
            restarts[role] = max(restarts.get(role, 0), number)
        for event in events:
            if event.name == "restored" and (incarnation := event.number("incarnation") or 0) > 0:
                restarts[process] = max(restarts.get(process, 0), incarnation)
            if fault := _fault(process, event):
                found.append(fault)
    found.sort(key=lambda f: f.time_s)
    told = _together(found)
    last = run.of("step")[-1] if run.of("step") else {}
    counted = [(said, run_data.number(last.get(name))) for name, said in _COUNTS.items()]
    counts = [(said, times) for said, times in counted if times and math.isfinite(times)]
    return Faults(
        happened=told[:MAX_SHOWN],
        num_happened=len(found),
        num_shown=sum(f.times for f in told[:MAX_SHOWN]),
        counts=counts,
        restarts=restarts,
    )


def _together(faults: Sequence[Fault]) -> list[Fault]:
    found: list[Fault] = []
    for fault in faults:
        before = found[-1] if found else None
        if before is not None and (before.process, before.what) == (fault.process, fault.what):
            found[-1] = dataclasses.replace(before, times=before.times + 1, last_s=fault.time_s)
        else:
            found.append(fault)
    return found


def _fault(process: str, event: Event) -> Fault | None:
    if process == SUPERVISOR:
        if event.name not in ("message", "exit"):
            return None
        what, detail = supervisor_message(event)
        return Fault(time_s=event.start_s, process=process, what=what, detail=detail[:_MAX_DETAIL])
    if event.name not in _SAYS or (event.name == "restored" and not event.args.get("incarnation")):
        return None
    return Fault(time_s=event.start_s, process=process, what=_SAYS[event.name], detail=_detail(event.args))


def _detail(args: Mapping[str, Any]) -> str:
    return visible(", ".join(f"{name} {value}" for name, value in args.items() if value not in ("", None)))[
        :_MAX_DETAIL
    ]


_MIN_OPEN_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """A round from its first ticket to its last publish; with publishes after every step, R/U updates."""

    number: int
    """Index from 0."""
    first_step: int
    """First update of the round."""
    last_step: int
    begin_s: float
    """Start, Unix time in seconds; `end_s` is its end."""
    end_s: float
    is_open: bool = False
    """True if the round is not complete. Its end is that of the event log, and `last_step` is the last step made."""

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.begin_s


def find_rounds(learner: Sequence[Event], *, updates_per_round: int, by_rounds: bool) -> list[Round]:
    """Returns the complete rounds; for a round trained again after a restart, the last time.

    `learner` are the learner's events by time, over all of its starts. `by_rounds` is True if tickets are issued per
    round instead of in a window.
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
    """Returns the incomplete round after the last complete one; None if there is none.

    It lasts from its first ticket, or the end of the previous round, to the last event of any process (`extent`). A
    hung process writes no events, but unfinished spans and other processes show it. Arguments as in `find_rounds`.
    """
    step, begin_s, started_s = 0, 0.0, 0.0
    for event in learner:  # by time: the step decreases after a restart
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
    return {step: e for e in learner if e.name == name and (step := e.number("step")) is not None}


def choose_rounds(rounds: Sequence[Round], limit: int) -> list[Round]:
    """Returns at most `limit` rounds in order: the first, last and slowest ones, and others evenly spread."""
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
