"""Timeline rectangles of the round view."""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.tools.report.run_data import RunData, json_for_script, number
from launch.tools.report.timeline_events import (
    SUPERVISOR,
    Event,
    Life,
    ProcessLifetime,
    ProcessRecord,
    extent,
    known_of,
    num_bytes,
    processes,
    read_process,
    role_of,
    supervisor_message,
)
from launch.tools.report.timeline_rounds import Faults, Round, choose_rounds, find_faults, find_rounds, open_round
from launch.tools.samples.samples_view import visible

KINDS = (
    "rollout",
    "reward",
    "evaluation",
    "train",
    "optimizer step",
    "publish",
    "pause",
    "prefetch",
    "engine start",
    "drain",
    "not finished",
    "compilation",
    "aside",
    "other",
    "idle",
)
"""Kinds of rectangles; the page has a color for each."""
_ASIDE = ("read weights", "restore", "hand over", "await weights", "probe", "save", "await evaluations", "write model")
_KIND_OF = {"apply": "optimizer step", "start engine": "engine start", "shutdown": "drain"} | dict.fromkeys(
    _ASIDE, "aside"
)
"""Kinds of the events that are not named like their kind."""
_WEIGHTS = ("pause", "prefetch")
_UNSHOWN = ("issue", "begin", "aborted")
"""Instant events that only mark other events; they are neither marks nor faults."""
MAX_OF_TRACK = 1500
"""Maximum rectangles per track in a round; only the longest are shown."""
_SPANS_A_MARK = 30
"""Rectangles of a track's limit per allowed mark of a process."""
MARGIN = 0.04
"""Share of a round's time shown before and after it."""
_IDLE_SHARE = 0.005
"""Minimum gap between two learner spans that counts as idle, as a share of the round."""


@dataclasses.dataclass
class _ProcessTrack:
    spans: list[Event] = dataclasses.field(default_factory=list[Event])
    instants: list[Event] = dataclasses.field(default_factory=list[Event])


@dataclasses.dataclass
class RoundTimeline:
    """Timelines of the chosen rounds, filled process by process."""

    rounds: Sequence[Round]
    run_end_s: float
    """Unix time of the last event of any process."""
    known: Mapping[str, ProcessRecord] = dataclasses.field(default_factory=dict[str, ProcessRecord])
    """Supervisor records by process; a process with a record has a track even without events."""

    def __post_init__(self) -> None:
        self.lives: dict[str, list[Life]] = {}
        for process, known in self.known.items():
            self._note_lives(process, ProcessLifetime(known))
        margins = [r.duration_s * MARGIN for r in self.rounds]
        self._begins = [r.begin_s - m for r, m in zip(self.rounds, margins, strict=True)]
        self._ends = [r.end_s + m for r, m in zip(self.rounds, margins, strict=True)]
        self._seen: list[dict[str, _ProcessTrack]] = [{} for _ in self.rounds]

    def add(self, process: str, events: Iterable[Event]) -> list[Event]:
        """Adds a process's events; returns its instant events that stand for themselves.

        An unfinished event becomes a span until its abort, or until its process exits.
        """
        lifetime = ProcessLifetime(self.known.get(process))
        under_way: dict[int | None, Event] = {}
        lost: list[Event] = []
        told: list[Event] = []
        for event in events:
            lifetime.add(event)
            match event.name:
                case "begin":
                    lane = event.number("lane")
                    if lane in under_way:  # the earlier process of the same name was killed
                        lost.append(under_way[lane])
                    under_way[lane] = event
                case "aborted" if begun := under_way.pop(event.number("lane"), None):
                    self._take(process, _unfinished(begun, event.end_s))
                case "rollout":
                    under_way.pop(event.tid, None)
                case _:
                    pass
            if event.name not in _UNSHOWN:
                self._take(process, event)
                if not event.is_span:
                    told.append(event)
        self._note_lives(process, lifetime)
        for begun in [*lost, *under_way.values()]:
            ends = [end for begin, end in self.lives[process] if begin <= begun.start_s <= end]
            self._take(process, _unfinished(begun, ends[0] if ends else begun.start_s))
        return told

    def _note_lives(self, process: str, lifetime: ProcessLifetime) -> None:
        recent_s = self.rounds[-1].begin_s if self.rounds else 0.0
        if lives := lifetime.lives(recent_s=recent_s, run_end_s=self.run_end_s):
            self.lives[process] = lives

    def _take(self, process: str, event: Event) -> None:
        low = bisect.bisect_left(self._ends, event.start_s)
        high = bisect.bisect_right(self._begins, event.end_s)
        for i in range(low, high):
            seen = self._seen[i].setdefault(process, _ProcessTrack())
            (seen.spans if event.is_span else seen.instants).append(event)

    def drawn(self, index: int, *, max_of_track: int = MAX_OF_TRACK) -> dict[str, Any]:
        """Returns a round's tracks and rectangles as JSON; times in seconds from its start."""
        max_marks = max(1, max_of_track // _SPANS_A_MARK)
        about = self.rounds[index]
        tracks, spans, marks, top = [], [], [], 0.0
        num_left_out = 0
        for role, names in self._roles().items():
            seen = [(name, self._seen[index].get(name, _ProcessTrack())) for name in names]
            events = [(name, event) for name, of in seen for event in of.spans]
            num_left_out += max(0, len(events) - max_of_track)
            kept = sorted(sorted(events, key=lambda e: -e[1].dur)[:max_of_track], key=lambda e: e[1].ts)
            lanes = _lanes([event for _, event in kept], is_learner=role.startswith("learner"))
            num_lanes = max(lanes, default=0) + 1
            height = min(6.0, max(1.0, 0.16 * num_lanes))
            alive = [shown for name in names for shown in self._alive(name, index)]
            y = {"y0": round(top, 4), "y1": round(top + height, 4)}
            tracks.append({"name": role, **y, "alive": alive})
            spans += _rectangles(kept, lanes, about, top=top, height=height, num_lanes=num_lanes)
            if role.startswith("learner"):
                spans += _idle([event for _, event in events], about, alive, top=top, height=height / num_lanes)
            for name, of in seen:
                marks += _marks(name, of.instants[:max_marks], about, at=top + height / 2)
            top += height + 0.25
        told = self._seen[index].get(SUPERVISOR, _ProcessTrack()).instants
        told = [e for e in told if e.name != "start"]
        for track in tracks:
            of_track = [e for e in told if role_of(str(e.args.get("process", "")))[0] == track["name"]]
            marks += _marks(SUPERVISOR, of_track[:max_marks], about, at=(track["y0"] + track["y1"]) / 2)
        return {
            "number": about.number,
            "steps": [about.first_step, about.last_step],
            "begin": about.begin_s,
            "seconds": round(about.duration_s, 4),
            "open": about.is_open,
            "tracks": tracks,
            "spans": [list(c) for c in zip(*spans, strict=True)] if spans else [[] for _ in range(6)],
            "marks": [list(c) for c in zip(*marks, strict=True)] if marks else [[], [], []],
            "left_out": num_left_out,
        }

    def _roles(self) -> dict[str, list[str]]:
        """Returns the processes that share a track: all starts of a role."""
        found: dict[str, list[str]] = {}
        for name in self.lives:
            if name != SUPERVISOR:
                found.setdefault(role_of(name)[0], []).append(name)
        return {role: sorted(names, key=lambda n: self.lives[n][0]) for role, names in found.items()}

    def _alive(self, name: str, index: int) -> list[list[float]]:
        begin_s, low_s, high_s = self.rounds[index].begin_s, self._begins[index], self._ends[index]
        shown = [(max(first_s, low_s) - begin_s, min(last_s, high_s) - begin_s) for first_s, last_s in self.lives[name]]
        return [[round(low, 4), round(high, 4)] for low, high in shown if low < high]


def _unfinished(begun: Event, end_s: float) -> Event:
    dur = max(0.0, end_s * 1e6 - begun.ts)
    return Event(name="not finished", ph="X", ts=begun.ts, dur=dur, tid=begun.number("lane") or 0, args=begun.args)


def _marks(process: str, instants: Sequence[Event], about: Round, *, at: float) -> list[list[Any]]:
    return [
        [
            round(e.start_s - about.begin_s, 4),
            round(at, 4),
            "; ".join(filter(None, supervisor_message(e)))
            if process == SUPERVISOR
            else visible(f"{process}: {e.name}{_told(e.args)}"),
        ]
        for e in instants
    ]


def _lanes(spans: Sequence[Event], *, is_learner: bool) -> list[int]:
    """Returns the row of each span; a group's rollout and reward share one, weight updates have a separate one."""
    keys = [-1 if event.name in _WEIGHTS and not is_learner else event.tid for event in spans]
    order = {key: lane for lane, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def _rectangles(
    spans: Sequence[tuple[str, Event]], lanes: Sequence[int], about: Round, *, top: float, height: float, num_lanes: int
) -> list[list[Any]]:
    """Returns [start, end, top, bottom, kind, text] per span; a pause spans the track's height."""
    found: list[list[Any]] = []
    each = height / num_lanes
    for (process, event), lane in zip(spans, lanes, strict=True):
        kind = _KIND_OF.get(event.name, event.name if event.name in KINDS else "other")
        if event.args.get("compiled"):
            kind = "compilation"
        elif event.args.get("kind") in ("eval", "probe") and kind in ("rollout", "reward"):
            kind = "evaluation"
        y0 = top + lane * each
        y0, y1 = (top, top + height) if kind in ("pause", "engine start", "drain") else (y0, y0 + each * 0.94)
        start_s, end_s = event.start_s - about.begin_s, event.end_s - about.begin_s
        text = visible(f"{process}: {event.name}{_told(event.args)}")
        found.append([round(start_s, 4), round(end_s, 4), round(y0, 4), round(y1, 4), KINDS.index(kind), text])
    return found


def _idle(
    spans: Sequence[Event], about: Round, alive: Sequence[Sequence[float]], *, top: float, height: float
) -> list[list[Any]]:
    """Returns the gaps in which the live learner waited for groups, or was starting, up to the round's last step."""
    busy = sorted((e.start_s, e.end_s) for e in spans if e.name != "publish")  # publishing runs concurrently
    ends = [e.end_s for e in spans if e.name in ("train", "apply") and e.end_s <= about.end_s + 1e-6]
    if not ends:
        return []
    gaps: list[Life] = []
    at_s = about.begin_s
    for start_s, end_s in busy:
        if start_s <= max(ends):
            gaps.append((at_s - about.begin_s, start_s - about.begin_s))
        at_s = max(at_s, end_s)
    lived = [(max(t0, first), min(t1, last)) for t0, t1 in gaps for first, last in alive]
    y0, y1, kind = round(top, 4), round(top + height * 0.94, 4), KINDS.index("idle")
    return [
        [round(t0, 4), round(t1, 4), y0, y1, kind, f"nothing for {t1 - t0:.3g} s"]
        for t0, t1 in lived
        if t1 - t0 > _IDLE_SHARE * about.duration_s
    ]


def _told(args: Mapping[str, Any]) -> str:
    shown = [
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in args.items()
        if k not in ("order", "lane") and v not in ("", None)
    ]
    text = ", ".join(shown)
    return f": {text[:120]}" if text else ""


Json = dict[str, Any]
MAX_ROUNDS = 48
BUDGET_BYTES = 1_000_000
"""Maximum JSON bytes of all rounds of a report."""
_MIN_ROUNDS = 4
"""Minimum rounds per run; each round is limited to this fraction of the budget."""
_MAX_READ_BYTES = 50_000_000
"""Approximate maximum bytes of events in memory; for longer logs fewer rounds are read."""


class Rounds(NamedTuple):
    """Rounds of a run in the report."""

    drawn: list[Json]
    """JSON of each shown round by time; the last may be incomplete."""
    num_rounds: int
    """Number of all rounds."""
    faults: Faults


def read_rounds(run: RunData, *, budget_bytes: int) -> Rounds:
    """Returns the timelines of chosen rounds within `budget_bytes` of JSON, and the run's faults."""
    names = processes(run.folder)
    learner = sorted(read_process(run.folder, "learner"), key=lambda e: e.ts) if "learner" in names else []
    supervisor = list(read_process(run.folder, SUPERVISOR)) if SUPERVISOR in names else []
    span = extent(run.folder)
    complete, unfinished = _rounds(run, learner, span)
    affordable = int(_MAX_READ_BYTES / max(1, num_bytes(run.folder)) * len(complete))
    chosen = choose_rounds(complete, max(_MIN_ROUNDS, min(MAX_ROUNDS, affordable))) + unfinished
    timeline = RoundTimeline(chosen, run_end_s=span[1] if span else 0.0, known=known_of(supervisor))
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
    per_round = run.updates_per_round
    by_rounds = run.setting("publish", "when", "round_end") == "round_end"
    complete = find_rounds(learner, updates_per_round=per_round, by_rounds=by_rounds)
    steps = [step for e in learner if e.name == "apply" and (step := e.number("step")) is not None]
    if span is None or run.is_done(steps[-1] if steps else 0):
        return complete, []
    unfinished = open_round(learner, updates_per_round=per_round, by_rounds=by_rounds, extent=span)
    return complete, [unfinished] if unfinished is not None else []


def _drawn(timeline: RoundTimeline, index: int, measured: Json, budget_bytes: int) -> Json:
    """Returns a round's JSON within a byte budget, dropping the shortest spans."""
    most = MAX_OF_TRACK
    while True:
        found = timeline.drawn(index, max_of_track=most) | measured
        if len(json_for_script(found)) <= budget_bytes or most <= 1:
            return found
        most //= 2


def _fitting(rounds: Sequence[Round], drawn: Sequence[Json], budget_bytes: int) -> list[int]:
    """Returns the indices of rounds within the budget: the incomplete one, and as many others as fit."""
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
    names = {
        "waiting": "round/waiting_ratio",
        "waiting_eq4": "round/waiting_ratio_eq4",
        "dispatch": "round/first_dispatch_s",
        "wait": "round/wait_s",
        "compute": "round/compute_s",
    }
    found = {key: number(row.get(name)) for key, name in names.items()}
    return {key: value for key, value in found.items() if math.isfinite(value)}
