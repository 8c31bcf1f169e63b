"""A ticket's race (redundant samples): RollPacker's speculative execution of responses, section 3. Pure.

A ticket may ask for more requests than its group has samples, eta_R K for K. The first K of them to end win and make
the group; by the K-th end the others have lost and are aborted, so a group never waits for its longest responses. One
that fails can't win, and the race goes on while K others still can.
With as many requests as samples nobody loses: then it is no race, and the same rules hold.
"""


class Race:
    """Which of a ticket's requests still run."""

    def __init__(self, *, num_samples: int, num_requests: int) -> None:
        """All requests, told by index from 0, run.

        Args:
          num_samples: K, how many win.
          num_requests: eta_R K, how many run.

        Raises:
          ValueError: fewer run than should win.
        """
        if not 1 <= num_samples <= num_requests:
            raise ValueError(f"want 1 <= num_samples <= num_requests, got {num_samples} and {num_requests}")
        self._num_to_win = num_samples
        self._running = set(range(num_requests))

    def end(self, index: int) -> list[int]:
        """Books a request that ended; it wins. Returns those that lose by it: all that still ran, at the K-th end.

        Raises:
          KeyError: it does not run: it ended before, or it lost.
        """
        self._running.remove(index)
        self._num_to_win -= 1
        if self._num_to_win:
            return []
        losers = sorted(self._running)
        self._running.clear()
        return losers

    def fail(self, index: int) -> bool:
        """Books a request that failed; whether K can still win without it.

        Raises:
          KeyError: it does not run.
        """
        self._running.remove(index)
        return len(self._running) >= self._num_to_win
