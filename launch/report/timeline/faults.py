"""Faults and restarts of a run, by its events and metrics. Pure."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.report import run_data
from launch.report.run_data import RunData
from launch.report.timeline.events import SUPERVISOR, Event
from launch.report.timeline.told import retold
from launch.samples.text import visible

MAX_SHOWN = 300
_SAYS = {
    "restored": "the learner went on from its checkpoint",
    "ess stop": "an update was not made: effective sample size below the floor",
    "fence": "an actor was fenced: its groups are refused",
    "unfence": "an actor was let in again",
    "fenced": "heard that it is fenced",
    "unfenced": "heard that it is let in again",
    "refused": "a version of the weights was refused",
    "abandoned": "groups of a learner that is gone were given up",
    "started over": "took up the weights of a restarted learner",
    "dropped": "a group was given up",
    "events lost": "the event log had no room on its disk",
}
"""Events that took no time and say that something was not as it should be."""
_COUNTS = {
    "skipped_updates": "updates whose loss or gradient was not finite",
    "ess_stops": "updates not made for want of effective sample size",
    "checkpoint/failed": "checkpoints that could not be saved",
    "actor/verifier_failures": "verifiers that failed or hung",
    "actor/episode_failures": "environments that failed or hung",
    "actor/dropped_groups": "groups given up as they could not be judged",
    "actor/judge_failures": "responses that the judge could not score",
    "groups/set_aside": "groups that could not be read",
    "publish/outlet_failures": "versions that could not be put into a bucket",
}
"""Metrics that count from the run's start, and are 0 where all is well."""
_MAX_DETAIL = 300
_RESTART = re.compile(r"-r(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happened once."""

    time_s: float
    """Unix time."""
    process: str
    what: str
    detail: str
    times: int = 1
    """How often it happened, nothing else between; the others may have other details."""
    last_s: float = 0.0
    """When it last did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """What went wrong in a run."""

    happened: list[Fault]
    """In order of time, what repeats itself once; the first `MAX_SHOWN`."""
    num_happened: int
    """All of them."""
    num_shown: int
    """Of all, how many `happened` tells."""
    counts: list[tuple[str, float]]
    """What is counted only, and how often it was."""
    restarts: dict[str, int]
    """How often each process was started again."""


def find_faults(run: RunData, instants: Mapping[str, Sequence[Event]]) -> Faults:
    """Everything that says that something went wrong; `instants` are a run's, by process."""
    found: list[Fault] = []
    restarts: dict[str, int] = {}
    for process, events in instants.items():
        if number := _RESTART.search(process):
            role = process[: number.start()]
            restarts[role] = max(restarts.get(role, 0), int(number[1]))
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
    """What a process says again and again becomes one, with how often it was."""
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
        if event.name != "told":
            return None
        what, detail = retold(str(event.args.get("line", "")))
        return Fault(time_s=event.start_s, process=process, what=what, detail=detail[:_MAX_DETAIL])
    if event.name not in _SAYS or (event.name == "restored" and not event.args.get("incarnation")):
        return None
    return Fault(time_s=event.start_s, process=process, what=_SAYS[event.name], detail=_detail(event.args))


def _detail(args: Mapping[str, Any]) -> str:
    return visible(", ".join(f"{name} {value}" for name, value in args.items() if value not in ("", None)))[
        :_MAX_DETAIL
    ]
