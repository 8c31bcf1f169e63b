"""What every process did in each of some rounds, as rectangles: a track a process, in it a lane for what overlaps."""

import bisect
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch.report.timeline.events import SUPERVISOR, Event, processes, read_process
from launch.report.timeline.rounds import Round
from launch.samples.text import visible

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
    "other",
    "idle",
)
"""What a rectangle may show; the page has a colour for each."""
_KIND_OF = {
    "rollout": "rollout",
    "reward": "reward",
    "train": "train",
    "apply": "optimizer step",
    "publish": "publish",
    "pause": "pause",
    "prefetch": "prefetch",
    "start engine": "engine start",
    "drain": "drain",
    "leave": "drain",
}
_WEIGHTS = ("pause", "prefetch")
MAX_SPANS = 1500
"""Of a round; of more the longest are shown."""
MAX_MARKS = 50
"""Of a process in a round."""
MARGIN = 0.04
"""Of a round's time, shown before and after it."""
_IDLE_SHARE = 0.005
"""Of a round: gaps between two spans of the learner that are shorter are no rest."""


@dataclasses.dataclass
class _Seen:
    """A process in a round."""

    spans: list[Event] = dataclasses.field(default_factory=list[Event])
    instants: list[Event] = dataclasses.field(default_factory=list[Event])


@dataclasses.dataclass
class Timeline:
    """The chosen rounds, filled process by process."""

    rounds: Sequence[Round]
    lives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    """From a process's first event to its last one, Unix time."""

    def __post_init__(self) -> None:
        margins = [r.duration_s * MARGIN for r in self.rounds]
        self._begins = [r.begin_s - m for r, m in zip(self.rounds, margins, strict=True)]
        self._ends = [r.end_s + m for r, m in zip(self.rounds, margins, strict=True)]
        self._seen: list[dict[str, _Seen]] = [{} for _ in self.rounds]

    def add(self, process: str, events: Iterable[Event]) -> Iterable[Event]:
        """Takes in a process's events; gives on those that took no time, for who looks for faults."""
        first_s, last_s = float("inf"), 0.0
        for event in events:
            first_s, last_s = min(first_s, event.start_s), max(last_s, event.end_s)
            low = bisect.bisect_left(self._ends, event.start_s)
            high = bisect.bisect_right(self._begins, event.end_s)
            for i in range(low, high):
                seen = self._seen[i].setdefault(process, _Seen())
                (seen.spans if event.is_span else seen.instants).append(event)
            if not event.is_span:
                yield event
        if last_s:
            self.lives[process] = (first_s, last_s)

    def drawn(self, index: int, *, run_end_s: float) -> dict[str, Any]:
        """A round's tracks and rectangles as JSON; times in seconds from its begin."""
        about = self.rounds[index]
        tracks, spans, marks, top = [], [], [], 0.0
        num_left_out = 0
        for role, names in self._roles().items():
            seen = [(name, self._seen[index].get(name, _Seen())) for name in names]
            events = [(name, event) for name, of in seen for event in of.spans]
            num_left_out += max(0, len(events) - MAX_SPANS)
            kept = sorted(sorted(events, key=lambda e: -e[1].dur)[:MAX_SPANS], key=lambda e: e[1].ts)
            lanes = _lanes([event for _, event in kept], is_learner=role.startswith("learner"))
            num_lanes = max(lanes, default=0) + 1
            height = min(6.0, max(1.0, 0.16 * num_lanes))
            alive = [self._alive(name, names, index, run_end_s) for name in names]
            y = {"y0": round(top, 4), "y1": round(top + height, 4)}
            tracks.append({"name": role, **y, "alive": [a for a in alive if a is not None]})
            spans += _rectangles(kept, lanes, about, top=top, height=height, num_lanes=num_lanes)
            if role.startswith("learner"):
                spans += _idle([event for _, event in kept], about, top=top, height=height / num_lanes)
            for name, of in seen:
                marks += _marks(name, of.instants, about, at=top + height / 2)
            top += height + 0.25
        told = self._seen[index].get(SUPERVISOR, _Seen()).instants
        for track in tracks:
            of_track = [e for e in told if _is_of(e, track["name"])]
            marks += _marks(SUPERVISOR, of_track, about, at=(track["y0"] + track["y1"]) / 2)
        return {
            "number": about.number,
            "steps": [about.first_step, about.last_step],
            "begin": about.begin_s,
            "seconds": round(about.duration_s, 4),
            "tracks": tracks,
            "spans": [list(c) for c in zip(*spans, strict=True)] if spans else [[] for _ in range(6)],
            "marks": [list(c) for c in zip(*marks, strict=True)] if marks else [[], [], []],
            "left_out": num_left_out,
        }

    def _roles(self) -> dict[str, list[str]]:
        """The processes that have a track together: a role's, over all of its starts."""
        found: dict[str, list[str]] = {}
        for name in self.lives:
            if name != SUPERVISOR:
                found.setdefault(_role(name), []).append(name)
        return {role: sorted(names, key=lambda n: self.lives[n][0]) for role, names in found.items()}

    def _alive(self, name: str, starts: Sequence[str], index: int, run_end_s: float) -> list[float] | None:
        """From when to when a process lived in a round; the last start of a role lived as long as the run."""
        first_s, last_s = self.lives[name]
        last_s = max(last_s, run_end_s) if name == starts[-1] else last_s
        begin_s = self.rounds[index].begin_s
        low, high = max(first_s, self._begins[index]) - begin_s, min(last_s, self._ends[index]) - begin_s
        return [round(low, 4), round(high, 4)] if low < high else None


def _marks(process: str, instants: Sequence[Event], about: Round, *, at: float) -> list[list[Any]]:
    """[time, height, what happened] of what took no time."""
    return [
        [
            round(e.start_s - about.begin_s, 4),
            round(at, 4),
            visible(str(e.args["line"]) if e.name == "told" else f"{process}: {e.name}{_told(e.args)}"),
        ]
        for e in instants[:MAX_MARKS]
        if e.name != "issue"
    ]


def _is_of(event: Event, role: str) -> bool:
    """Whether the supervisor spoke of a role's process."""
    return event.name == "told" and _role(str(event.args.get("line", "")).partition(" ")[0]) == role


def _role(name: str) -> str:
    head, sep, tail = name.rpartition("-r")
    return head if sep and tail.isdigit() else name


def _lanes(spans: Sequence[Event], *, is_learner: bool) -> list[int]:
    """The lane of each span; a group's rollout and reward share one, weights have one of their own."""
    keys = [-1 if event.name in _WEIGHTS and not is_learner else event.tid for event in spans]
    order = {key: lane for lane, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def _rectangles(
    spans: Sequence[tuple[str, Event]], lanes: Sequence[int], about: Round, *, top: float, height: float, num_lanes: int
) -> list[list[Any]]:
    """[start, end, top, bottom, kind, what it was] of each; a pause is as high as its track."""
    found: list[list[Any]] = []
    each = height / num_lanes
    for (process, event), lane in zip(spans, lanes, strict=True):
        kind = _KIND_OF.get(event.name, "other")
        if event.args.get("kind") in ("eval", "probe") and kind in ("rollout", "reward"):
            kind = "evaluation"
        y0 = top + lane * each
        y0, y1 = (top, top + height) if kind in ("pause", "engine start", "drain") else (y0, y0 + each * 0.94)
        start_s, end_s = event.start_s - about.begin_s, event.end_s - about.begin_s
        text = visible(f"{process}: {event.name}{_told(event.args)}")
        found.append([round(start_s, 4), round(end_s, 4), round(y0, 4), round(y1, 4), KINDS.index(kind), text])
    return found


def _idle(spans: Sequence[Event], about: Round, *, top: float, height: float) -> list[list[Any]]:
    """Where the learner computed nothing between the round's begin and its last step."""
    busy = sorted((e.start_s, e.end_s) for e in spans if e.name in ("train", "apply"))
    ends = [end for _, end in busy if end <= about.end_s + 1e-6]
    if not ends:
        return []
    found: list[list[Any]] = []
    at_s = about.begin_s
    for start_s, end_s in busy:
        if start_s - at_s > _IDLE_SHARE * about.duration_s and start_s <= max(ends):
            t0, t1 = at_s - about.begin_s, start_s - about.begin_s
            text = f"no training for {t1 - t0:.3g} s"
            found.append(
                [round(t0, 4), round(t1, 4), round(top, 4), round(top + height * 0.94, 4), KINDS.index("idle"), text]
            )
        at_s = max(at_s, end_s)
    return found


def _told(args: Mapping[str, Any]) -> str:
    """The arguments of an event in a few words."""
    shown = [
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in args.items()
        if k != "order" and v not in ("", None)
    ]
    text = ", ".join(shown)
    return f": {text[:120]}" if text else ""


def read_timeline(folder: pathlib.Path, rounds: Sequence[Round]) -> tuple[Timeline, dict[str, list[Event]]]:
    """Fills a timeline from a run's event log; and what took no time, by process."""
    timeline = Timeline(rounds)
    instants = {name: list(timeline.add(name, read_process(folder, name))) for name in processes(folder)}
    return timeline, instants
