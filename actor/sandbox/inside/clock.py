"""Time that a program has used: CPU seconds of all its processes, and time in which it only waited.

Neither grows while a program could run and gets no core, so that a busy machine makes no program slow.
"""

from actor.sandbox.inside import watch

IDLE_FACTOR = 5
"""Idle seconds that count as one: what sleeps or waits for itself ends, too, and a slow disk costs little."""


class Clock:
    """Time of one run, counted at each look."""

    def __init__(self, began, before_s):
        """Starts at `began`; `before_s` are CPU seconds that the first process had used by then."""
        self._looked = began
        self._before_s = before_s
        self._cpu_s = 0.0
        self._idle_s = 0.0

    def look(self, now, planned_s):
        """Counts the time since the last look, at most `planned_s` of it as idle: a late look saw nothing."""
        cpu_s, is_runnable = watch.cpu()
        cpu_s = max(self._cpu_s, cpu_s - self._before_s)
        if not is_runnable:
            self._idle_s += max(0.0, min(now - self._looked, planned_s) - (cpu_s - self._cpu_s))
        self._cpu_s, self._looked = cpu_s, now

    def is_over(self, timeout_s):
        """Returns True if the program has used that much."""
        if self._spent(self._cpu_s) < timeout_s:
            return False
        # A child that is reaped between two reads of one look is counted twice.
        self._cpu_s = min(self._cpu_s, max(0.0, watch.cpu()[0] - self._before_s))
        return self._spent(self._cpu_s) >= timeout_s

    def seconds(self, cpu_s):
        """Time that the run took; `cpu_s` is what the kernel counted of all its processes when they had ended."""
        return self._spent(max(0.0, cpu_s - self._before_s))

    def _spent(self, cpu_s):
        return max(cpu_s, self._idle_s / IDLE_FACTOR)
