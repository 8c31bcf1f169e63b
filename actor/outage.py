"""When nothing can be judged any more: verifiers, or environments, broken for good. Pure, but for the clock."""

import time
from collections.abc import Callable

from bridge.types import Ticket

MIN_ROWS = 32
"""Rows of which a group was dropped without one success between them; one bad row, however often offered, is one."""
MIN_S = 60.0
"""And so long after the first of them: what is away for a moment drops whatever is in flight."""
MANY_S = 600.0
"""After so long it is broken whatever the rows: there may be fewer of them."""


class Outage:
    """Groups that were dropped since the last success."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None so far."""
        self._clock = clock
        self._rows: set[int] = set()
        self._num_dropped = 0
        self._since_s = 0.0

    def ended(self) -> None:
        """A group was judged."""
        self._rows.clear()
        self._num_dropped = 0

    def is_for_good(self, ticket: Ticket) -> bool:
        """Whether, now that this one's group was dropped too, waiting is in vain."""
        now_s = self._clock()
        if not self._num_dropped:
            self._since_s = now_s
        self._num_dropped += 1
        self._rows.add(hash((ticket.prompt_tokens.tobytes(), ticket.task.answer, ticket.task.metadata)))
        lasted_s = now_s - self._since_s
        return self._num_dropped >= MIN_ROWS and (
            lasted_s >= MANY_S or (lasted_s >= MIN_S and len(self._rows) >= MIN_ROWS)
        )

    def __str__(self) -> str:
        """For people."""
        lasted_s = self._clock() - self._since_s
        return f"{self._num_dropped} groups of {len(self._rows)} rows in a row, for {lasted_s:.0f} s,"
