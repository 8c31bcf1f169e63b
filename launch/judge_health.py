"""Whether a judge's server does its work, by what its `/health` says: pure, the times are told."""

STEADY_S = 60.0
"""One that served for so long starts the count of restarts anew; how long it took to start doesn't count."""
LOOK_S = 5.0
"""How often it is asked once it has served; before, how often is the caller's."""
MAX_MISSED = 6
"""Looks in a row without an answer, each as long as its deadline: then a server that served has hung."""


class Health:
    """Of one process, from its start to its end."""

    def __init__(self, *, start_timeout_s: float, now_s: float) -> None:
        """It was started now."""
        self._start_timeout_s, self._started_s = start_timeout_s, now_s
        self._served_from_s: float | None = None
        self._answered_s = now_s
        self._looked_s = now_s
        self._num_missed = 0

    def is_due(self, now_s: float) -> bool:
        """Whether to look."""
        return self._served_from_s is None or now_s - self._looked_s >= LOOK_S

    def looked(self, *, answers: bool, now_s: float) -> str:
        """Notes what was seen; why the process is to be killed, empty if it is not."""
        self._looked_s = now_s
        if answers:
            self._num_missed, self._answered_s = 0, now_s
            if self._served_from_s is None:
                self._served_from_s = now_s
            return ""
        if self._served_from_s is None:
            is_late = now_s - self._started_s > self._start_timeout_s
            return f"did not serve within {self._start_timeout_s:g} s (judge.start_timeout_s)" if is_late else ""
        self._num_missed += 1
        return f"did not answer {self._num_missed} times in a row" if self._num_missed >= MAX_MISSED else ""

    @property
    def was_steady(self) -> bool:
        """Whether it served for long."""
        return self._served_from_s is not None and self._answered_s - self._served_from_s >= STEADY_S
