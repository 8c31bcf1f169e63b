"""Race of a ticket's redundant requests: the first K that finish make the group (RollPacker section 3). Pure."""


class SampleRace:
    """Race of one ticket's requests (RollPacker section 3)."""

    def __init__(self, *, num_samples: int, num_requests: int) -> None:
        """Starts `num_requests` (eta_R K) requests, indexed from 0, of which `num_samples` (K) win."""
        if not 1 <= num_samples <= num_requests:
            raise ValueError(f"expected 1 <= num_samples <= num_requests, got {num_samples} and {num_requests}")
        self._num_to_win = num_samples
        self._running = set(range(num_requests))

    def finish(self, index: int) -> list[int]:
        """Marks a request as finished, so it wins. Returns the losers: at the K-th win all still running, else none."""
        self._running.remove(index)
        self._num_to_win -= 1
        if self._num_to_win:
            return []
        losers = sorted(self._running)
        self._running.clear()
        return losers

    def fail(self, index: int) -> bool:
        """Marks a request as failed; returns True if K requests can still win."""
        self._running.remove(index)
        return len(self._running) >= self._num_to_win

    def stop(self, index: int) -> None:
        """Marks a request as stopped: it neither wins nor loses. Raises KeyError if it does not run."""
        self._running.remove(index)

    @property
    def is_stopped(self) -> bool:
        """True if no request runs, and fewer than K have won."""
        return not self._running and self._num_to_win > 0
