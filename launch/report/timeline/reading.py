"""The timelines of a run's rounds: as many as the report has room for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.report.page.escaping import json_for_script
from launch.report.run_data import RunData, number
from launch.report.timeline.events import SUPERVISOR, Event, extent, num_bytes, processes, read_process
from launch.report.timeline.faults import Faults, find_faults
from launch.report.timeline.lives import known_of
from launch.report.timeline.rounds import Round, choose_rounds, find_rounds, open_round
from launch.report.timeline.spans import MAX_OF_TRACK, Timeline

Json = dict[str, Any]
MAX_ROUNDS = 48
BUDGET_BYTES = 1_000_000
"""Of all rounds of a report together, as JSON."""
_MIN_ROUNDS = 4
"""Of each run: a round has at most one in so many of its bytes, so the ends, the slowest and an open one always fit."""
_MAX_READ_BYTES = 50_000_000
"""Of the event log that is held at once, about; of a longer one fewer rounds are read."""


class Rounds(NamedTuple):
    """What a report shows of a run's rounds."""

    drawn: list[Json]
    """In order of time; the last may be open."""
    num_rounds: int
    """All there are."""
    faults: Faults


def read_rounds(run: RunData, *, budget_bytes: int) -> Rounds:
    """The timelines of chosen rounds, whose JSON is within `budget_bytes`, and what went wrong in the run."""
    names = processes(run.folder)
    learner = sorted(read_process(run.folder, "learner"), key=lambda e: e.ts) if "learner" in names else []
    supervisor = list(read_process(run.folder, SUPERVISOR)) if SUPERVISOR in names else []
    span = extent(run.folder)
    complete, unfinished = _rounds(run, learner, span)
    affordable = int(_MAX_READ_BYTES / max(1, num_bytes(run.folder)) * len(complete))
    chosen = choose_rounds(complete, max(_MIN_ROUNDS, min(MAX_ROUNDS, affordable))) + unfinished
    timeline = Timeline(chosen, run_end_s=span[1] if span else 0.0, known=known_of(supervisor))
    known = {"learner": learner, SUPERVISOR: supervisor}
    instants = {name: timeline.add(name, known.get(name) or read_process(run.folder, name)) for name in names}
    measured = {r["step"]: r for r in run.of("round")}
    facts = [{} if r.is_open else _of_round(measured.get(r.last_step, {})) for r in chosen]
    drawn = [_drawn(timeline, i, of, budget_bytes // _MIN_ROUNDS - 1) for i, of in enumerate(facts)]
    kept = _fitting(chosen, drawn, budget_bytes)
    return Rounds([drawn[i] for i in kept], len(complete) + len(unfinished), find_faults(run, instants))


def _rounds(
    run: RunData, learner: Sequence[Event], span: tuple[float, float] | None
) -> tuple[list[Round], list[Round]]:
    """The rounds that were completed, and the one that was not, if there is one."""
    per_round = run.updates_per_round
    by_rounds = run.setting("publish", "when", "round_end") == "round_end"
    complete = find_rounds(learner, updates_per_round=per_round, by_rounds=by_rounds)
    steps = [step for e in learner if e.name == "apply" and (step := e.number("step")) is not None]
    if span is None or run.is_done(steps[-1] if steps else 0):
        return complete, []
    unfinished = open_round(learner, updates_per_round=per_round, by_rounds=by_rounds, extent=span)
    return complete, [unfinished] if unfinished is not None else []


def _drawn(timeline: Timeline, index: int, measured: Json, budget_bytes: int) -> Json:
    """A round within so many bytes: its shorter spans go."""
    most = MAX_OF_TRACK
    while True:
        found = timeline.drawn(index, max_of_track=most) | measured
        if len(json_for_script(found)) <= budget_bytes or most <= 1:
            return found
        most //= 2


def _fitting(rounds: Sequence[Round], drawn: Sequence[Json], budget_bytes: int) -> list[int]:
    """Indices of the most rounds that fit together: an open one, the ends, the slowest, and evenly between."""
    sizes = {r: len(json_for_script(d)) + 1 for r, d in zip(rounds, drawn, strict=True)}
    unfinished = [r for r in rounds if r.is_open]
    complete = [r for r in rounds if not r.is_open]
    kept = unfinished
    for limit in range(len(complete), 0, -1):
        tried = choose_rounds(complete, limit) + unfinished
        if sum(sizes[r] for r in tried) <= budget_bytes:
            kept = tried
            break
    return [i for i, r in enumerate(rounds) if r in kept]


def _of_round(row: Mapping[str, Any]) -> Json:
    """What the metrics say of a round."""
    names = {
        "waiting": "round/waiting_ratio",
        "waiting_eq4": "round/waiting_ratio_eq4",
        "dispatch": "round/first_dispatch_s",
        "wait": "round/wait_s",
        "compute": "round/compute_s",
    }
    found = {key: number(row.get(name)) for key, name in names.items()}
    return {key: value for key, value in found.items() if math.isfinite(value)}
