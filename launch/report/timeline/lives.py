"""When each process of a run lived: by its own events, and by what its supervisor says of it. Pure."""

import bisect
import dataclasses
from collections.abc import Iterable

from launch.report.timeline.events import Event
from launch.report.timeline.told import dead

Life = tuple[float, float]
"""From when to when, Unix time."""


@dataclasses.dataclass
class Known:
    """What a run's supervisor says of one of its processes; Unix times, in their order."""

    bounds: list[float] = dataclasses.field(default_factory=list[float])
    """Where one life ends, if it has not ended before, and another may begin."""
    starts: set[float] = dataclasses.field(default_factory=set[float])
    """Of these those where one does begin."""
    ends: list[float] = dataclasses.field(default_factory=list[float])


def known_of(supervisor: Iterable[Event]) -> dict[str, Known]:
    """By process, over all of the supervisor's own starts."""
    found: dict[str, Known] = {}
    alive: set[str] = set()
    for event in sorted(supervisor, key=lambda e: e.ts):
        match event.name:
            case "start":
                name = str(event.args.get("process", ""))
                if name in alive and name.startswith("learner"):
                    # A supervisor that was killed told nothing, and took all with it: this is another one.
                    for other in alive - {name}:
                        found[other].bounds.append(event.start_s)
                    alive.clear()
                known = found.setdefault(name, Known())
                known.bounds.append(event.start_s)
                known.starts.add(event.start_s)
                alive.add(name)
            case "told" if (name := dead(str(event.args.get("line", "")))) in alive:
                found[name].ends.append(event.start_s)
                alive.remove(name)
            case "end":
                for name in alive:
                    found[name].ends.append(event.start_s)
                alive.clear()
            case _:
                pass
    return found


class Lifetime:
    """A process's lives, found while its events go by."""

    def __init__(self, known: Known | None = None) -> None:
        """Nothing went by yet; `known` is None of a process that no supervisor of this run started."""
        self._known = known or Known()
        self._seen: dict[int, Life] = {}
        self._left_s: dict[int, float] = {}

    def add(self, event: Event) -> None:
        """Takes in an event of the process; their order doesn't matter."""
        i = bisect.bisect_right(self._known.bounds, event.start_s)
        first_s, last_s = self._seen.get(i, (event.start_s, event.end_s))
        self._seen[i] = (min(first_s, event.start_s), max(last_s, event.end_s))
        if event.name == "leave":
            self._left_s[i] = max(self._left_s.get(i, 0.0), event.end_s)

    def lives(self, *, recent_s: float, run_end_s: float) -> list[Life]:
        """From when to when it lived, in order.

        A life without a known end lasts until the run's, where a supervisor would have told of its end, or where the
        process wrote an event since `recent_s`; else until its last event.
        """
        bounds = self._known.bounds
        found: list[Life] = []
        for i in range(len(bounds) + 1):
            seen = self._seen.get(i)
            is_started = i > 0 and bounds[i - 1] in self._known.starts
            if seen is None and not is_started:
                continue
            begin_s = bounds[i - 1] if is_started else seen[0] if seen else 0.0
            last_s = seen[1] if seen else begin_s
            limit_s = bounds[i] if i < len(bounds) else float("inf")
            ends = [end for end in self._known.ends if begin_s <= end <= limit_s]
            if ends:
                end_s = max(last_s, ends[0])
            elif i < len(bounds) or self._left_s.get(i, -1.0) >= last_s:
                end_s = last_s
            elif is_started or last_s >= recent_s:
                end_s = max(last_s, run_end_s)
            else:
                end_s = last_s
            found.append((begin_s, end_s))
        return found
