"""How many sequences the engine runs, looked at again and again, and what that comes to over a stretch of time."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actor.engine_protocol import EngineStats

LOOK_S = 0.01
"""About two engine steps of the tiny model."""


class LoadLog:
    """Looks at an engine's load, for as long as `watch` runs."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self.seen: list[tuple[float, int]] = []
        """Unix seconds, and the requests that ran then."""

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.seen.append((time.time(), self._stats().num_running))
            await asyncio.sleep(LOOK_S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steady:
    """The stretch of a run that counts as its steady state, in Unix seconds."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], *, warmup_updates: int) -> "Steady":
        """From the end of update number `warmup_updates` to the end of the last one, by a run's event log.

        Before it the engine fills from empty with responses that all began at once; after it nobody asks any more.
        Raises ValueError if no update is left.
        """
        ends = sorted((e["ts"] + e["dur"]) / 1e6 for e in events if e["name"] == "apply")
        if not 0 < warmup_updates < len(ends):
            raise ValueError(f"{len(ends)} updates have no steady state after {warmup_updates}")
        return cls(start_s=ends[warmup_updates - 1], end_s=ends[-1])


def mean_running(seen: Sequence[tuple[float, int]], stretch: Steady) -> float:
    """Sequences running, averaged over time; each look counts until the next one.

    Raises ValueError if nobody looked in that stretch.
    """
    weighted = total_s = 0.0
    for (start_s, running), (end_s, _) in zip(seen, seen[1:], strict=False):
        seconds = min(end_s, stretch.end_s) - max(start_s, stretch.start_s)
        if seconds > 0:
            weighted, total_s = weighted + seconds * running, total_s + seconds
    if not total_s:
        raise ValueError(f"no look at the engine between {stretch.start_s} and {stretch.end_s}")
    return weighted / total_s
