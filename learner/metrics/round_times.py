"""Waiting and compute times of a round: the papers' waiting ratios. Callers pass the times."""

import dataclasses


@dataclasses.dataclass
class WaitingRatios:
    """Times of one round, in seconds of a monotonic clock, and their metrics.

    A clock that jumps back counts as stopped, so that no duration is negative.
    """

    rollout_start_s: float | None = None
    first_dispatch_s: float | None = None
    last_arrival_s: float | None = None
    train_start_s: float | None = None
    train_end_s: float | None = None
    compute_s: float = 0.0
    aside_s: float = 0.0
    """Seconds of other work (publish, save, probe) before the last compute interval; excluded from the waiting
    ratio."""
    _last_aside_s: float = 0.0
    _num_arrived: int = 0
    _set_back_s: float = 0.0

    def rollout_started(self, now_s: float) -> None:
        """Records that the round's tickets may be issued; only the first call per round counts."""
        if self.rollout_start_s is None:
            self.rollout_start_s = now_s + self._set_back_s

    def dispatched(self, now_s: float, *, fills_update: bool) -> None:
        """Records that groups reached the trainer; `fills_update` is True if an update then has all of its U groups."""
        if fills_update and self.first_dispatch_s is None:
            self.first_dispatch_s = self._forward(now_s, self.rollout_start_s)

    def arrived(self, now_s: float, num_groups: int) -> None:
        """Records how many of the round's groups have arrived by now."""
        if num_groups > self._num_arrived:
            self._num_arrived, self.last_arrival_s = num_groups, self._forward(now_s, self.rollout_start_s)

    def trained(self, start_s: float, end_s: float) -> None:
        """Records that the trainer computed from `start_s` to `end_s`."""
        start_s = self._forward(start_s, self.rollout_start_s if self.train_end_s is None else self.train_end_s)
        end_s = self._forward(end_s, start_s)
        if self.train_start_s is None:
            self.train_start_s = start_s
        self.train_end_s = end_s
        self.compute_s += end_s - start_s
        self.aside_s += self._last_aside_s
        self._last_aside_s = 0.0

    def exclude(self, seconds: float) -> None:
        """Records seconds of other work: a publish, a save, or a wait for a probe.

        Work between two rounds, such as a save, or before the first round is not counted.
        """
        if self.rollout_start_s is not None:
            self._last_aside_s += seconds

    def _forward(self, now_s: float, before_s: float | None) -> float:
        """Returns the time, shifted so that it is not before `before_s`."""
        if before_s is not None:
            self._set_back_s = max(self._set_back_s, before_s - now_s)
        return now_s + self._set_back_s

    def finish(self) -> dict[str, float]:
        """Returns the round's metrics up to the end of its training, and resets the timer.

        `waiting_ratio_eq4` is (t_start - t_rollout_start) / (t_train_end - t_rollout_start) (RolloutPipe eq. 4). Its
        t_start is the first dispatch of U complete groups (eq. 2), although training may begin with the first group.
        `waiting_ratio` is wait / (wait + compute) over the same span (section 5.1), where `wait_s` is all time except
        `compute_s` and excluded time. `rollout_to_train_end_s` is the paper's main time. `first_dispatch_s` ends at the
        first dispatch (section 5.2), and `first_group_s` at the first training. `recovered_s` is from the first
        dispatch to the arrival of the round's last group (eq. 3), as far as `arrived` was called. Raises ValueError if
        the round has no update.
        """
        start_s, first_s, train_s, end_s = (
            self.rollout_start_s,
            self.first_dispatch_s,
            self.train_start_s,
            self.train_end_s,
        )
        if start_s is None or first_s is None or train_s is None or end_s is None:
            raise ValueError("the round ended without an update")
        total = max(end_s - start_s, 1e-9)
        wait = max(0.0, total - self.aside_s - self.compute_s)
        last_s = max(first_s, self.last_arrival_s or first_s)
        metrics = {
            "round/waiting_ratio_eq4": (first_s - start_s) / total,
            "round/waiting_ratio": wait / max(wait + self.compute_s, 1e-9),
            "round/wait_s": wait,
            "round/compute_s": self.compute_s,
            "round/rollout_to_train_end_s": total,
            "round/first_dispatch_s": first_s - start_s,
            "round/first_group_s": train_s - start_s,
            "round/recovered_s": last_s - first_s,
        }
        self.rollout_start_s = self.first_dispatch_s = self.train_start_s = self.train_end_s = None
        self.last_arrival_s, self._num_arrived = None, 0
        self.compute_s = self.aside_s = self._last_aside_s = 0.0
        return metrics
