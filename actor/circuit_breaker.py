"""Circuit breaker: tells a permanent failure of scoring from bad rows and short outages."""

import time
from collections.abc import Callable

from bridge.rollout_types import Ticket

MIN_ROWS = 32
"""Distinct rows with dropped groups, without a success between, that trip the breaker. A retried row counts once."""
MIN_S = 60.0
"""Minimum seconds since the first of these drops. A short outage drops everything in flight at once."""
MANY_S = 600.0
"""Seconds after which MIN_ROWS drops suffice, whatever the rows: the data may have fewer rows."""


class CircuitBreaker:
    """Counter of groups dropped since the last success."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: set[int] = set()
        self._num_dropped = 0
        self._since_s = 0.0

    def record_success(self) -> None:
        """Resets the counter: a group was scored."""
        self._rows.clear()
        self._num_dropped = 0

    def record_failure(self, ticket: Ticket) -> bool:
        """Counts a dropped group; returns True if the outage counts as permanent."""
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
        """Returns a human-readable count."""
        lasted_s = self._clock() - self._since_s
        return f"{self._num_dropped} groups of {len(self._rows)} rows in a row, for {lasted_s:.0f} s,"
