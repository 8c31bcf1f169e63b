"""When a round waited and when it trained: the papers' waiting ratios. Pure; times are passed in."""

import dataclasses


@dataclasses.dataclass
class WaitingRatios:
    """Collects one round's times (seconds of a monotonic clock) and gives its metrics when it ends.

    A clock that is set back counts as one that stood still, so that no length of time is negative.
    """

    rollout_start_s: float | None = None
    first_dispatch_s: float | None = None
    train_start_s: float | None = None
    train_end_s: float | None = None
    compute_s: float = 0.0
    aside_s: float = 0.0
    """Neither waiting for groups nor computing, and over before the last computing began."""
    _last_aside_s: float = 0.0
    _set_back_s: float = 0.0

    def rollout_started(self, now_s: float) -> None:
        """The round's tickets may go out; only the first call of a round counts."""
        if self.rollout_start_s is None:
            self.rollout_start_s = now_s + self._set_back_s

    def dispatched(self, now_s: float, *, fills_update: bool) -> None:
        """Groups were handed to the trainer; with them an update has all of its U groups, or not."""
        if fills_update and self.first_dispatch_s is None:
            self.first_dispatch_s = self._forward(now_s, self.rollout_start_s)

    def trained(self, start_s: float, end_s: float) -> None:
        """The trainer computed from `start_s` to `end_s`."""
        start_s = self._forward(start_s, self.rollout_start_s if self.train_end_s is None else self.train_end_s)
        end_s = self._forward(end_s, start_s)
        if self.train_start_s is None:
            self.train_start_s = start_s
        self.train_end_s = end_s
        self.compute_s += end_s - start_s
        self.aside_s += self._last_aside_s
        self._last_aside_s = 0.0

    def exclude(self, seconds: float) -> None:
        """The learner was busy otherwise: it published, saved, or waited for a probe.

        Between two rounds, as a save is, or before the first, it is no round's and counts nothing.
        """
        if self.rollout_start_s is not None:
            self._last_aside_s += seconds

    def _forward(self, now_s: float, before_s: float | None) -> float:
        """Returns a time that is not below one before it."""
        if before_s is not None:
            self._set_back_s = max(self._set_back_s, before_s - now_s)
        return now_s + self._set_back_s

    def finish(self) -> dict[str, float]:
        """The round's metrics, up to where its training ended; the clock starts over.

        `waiting_ratio_eq4` is (t_start - t_rollout_start) / (t_train_end - t_rollout_start) (RolloutPipe eq. 4), with
        t_start the first dispatch, of U complete groups (eq. 2), though training may begin with the first group;
        `waiting_ratio` is wait / (wait + compute) over the same span (section 5.1), where all that is not compute is
        wait, but for what was set aside; `wait_s` and `compute_s` are the two. `rollout_to_train_end_s` is the paper's
        main time, `first_dispatch_s` ends with its first dispatch, of U groups (section 5.2); `first_group_s` with the
        first group's.

        Raises:
          ValueError: no update was made since the last one.
        """
        start_s, first_s, train_s, end_s = (
            self.rollout_start_s,
            self.first_dispatch_s,
            self.train_start_s,
            self.train_end_s,
        )
        if start_s is None or first_s is None or train_s is None or end_s is None:
            raise ValueError("a round ended that never started")
        total = max(end_s - start_s, 1e-9)
        wait = max(0.0, total - self.aside_s - self.compute_s)
        metrics = {
            "round/waiting_ratio_eq4": (first_s - start_s) / total,
            "round/waiting_ratio": wait / max(wait + self.compute_s, 1e-9),
            "round/wait_s": wait,
            "round/compute_s": self.compute_s,
            "round/rollout_to_train_end_s": total,
            "round/first_dispatch_s": first_s - start_s,
            "round/first_group_s": train_s - start_s,
        }
        self.rollout_start_s = self.first_dispatch_s = self.train_start_s = self.train_end_s = None
        self.compute_s = self.aside_s = self._last_aside_s = 0.0
        return metrics
