"""What is said of a run where there is no terminal: each thing once, when it begins, and now and then that it lasts."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.console.live_view import OF_SET, RunView, format_estimates, told

STEP_LINE_S = 5.0
"""Between two lines of steps, and of many processes' states."""
FIRST_STILL_S, MAX_STILL_S = 60.0, 1800.0
"""After so long without a line it is said what is waited for; doubled each time."""


_ID = re.compile(r"pid \d+, ")
"""Said of a process once."""


class PlainProgress:
    """Lines about a run, for a log or a pipe; no two are the same but for the time."""

    def __init__(self, view: RunView, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Says nothing yet; `clock` is monotonic, in seconds."""
        self._view, self._say_line, self._clock = view, say, clock
        self._began_s = self._said_s = self._states_s = clock()
        self._still_s = FIRST_STILL_S
        self._step = 0
        self._said: set[str] = set()
        self._ids: set[str] = set()
        self._is_first = True

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called again and again, with what is new in the metrics."""
        for row in rows:
            if row["kind"] == "eval":
                self._say(f"held-out reward {row['eval/reward']:.3f} at step {row['step']}")
            if row["kind"].startswith(OF_SET):
                self._say(f"evaluation {row['set']} {format_estimates(row)} at step {row['step']}")
        now_s = self._clock()
        if self._view.steps:
            step = self._view.steps[-1]["step"]
            if step != self._step and (not self._step or now_s - self._said_s >= STEP_LINE_S):
                self._step = step
                self._say(self._view.line())
        else:
            self._say_states(now_s)
        if self._clock() - self._said_s >= self._still_s:
            waited_s, self._still_s = self._still_s, min(2 * self._still_s, MAX_STILL_S)
            where = f"still at step {self._step}" if self._step else "still starting"
            self._say(f"{where}, nothing new for {waited_s:.0f} s: {'; '.join(told(self._view.status))}", is_new=False)

    def _say_states(self, now_s: float) -> None:
        """What processes are at, when that changes; of many not each change of how many there are."""
        states = told(self._view.status)
        if len(self._view.status) > len(states) and not self._is_first and now_s - self._states_s < STEP_LINE_S:
            return
        self._is_first, self._states_s = False, now_s
        for state in states:
            known = _ID.sub("", state)
            ids = set(_ID.findall(state))
            if known not in self._said or ids - self._ids:
                self._say(state if ids - self._ids else known)
                self._said.add(known)
                self._ids |= ids

    def _say(self, line: str, *, is_new: bool = True) -> None:
        self._said_s = self._clock()
        if is_new:
            self._still_s = FIRST_STILL_S
        self._say_line(f"[{self._said_s - self._began_s:5.0f} s] {line}")
