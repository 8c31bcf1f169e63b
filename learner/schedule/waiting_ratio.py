"""When a round waited and when it trained: the papers' waiting ratios. Pure; times are passed in."""

import dataclasses


@dataclasses.dataclass
class RoundClock:
    """Collects one round's times and gives its metrics when it ends."""

    rollout_start_s: float | None = None
    train_start_s: float | None = None
    compute_s: float = 0.0

    def rollout_started(self, now_s: float) -> None:
        """The round's tickets were issued; only the first call of a round counts."""
        if self.rollout_start_s is None:
            self.rollout_start_s = now_s

    def trained(self, start_s: float, end_s: float) -> None:
        """The trainer computed from `start_s` to `end_s`."""
        if self.train_start_s is None:
            self.train_start_s = start_s
        self.compute_s += end_s - start_s

    def finish(self, train_end_s: float) -> dict[str, float]:
        """The round's metrics; the clock starts over.

        `waiting_ratio_eq4` is (t_start - t_rollout_start) / (t_train_end - t_rollout_start) (RolloutPipe
        eq. 4); `waiting_ratio` is wait / (wait + compute) over the same span (section 5.1), where all that
        is not compute is wait.
        """
        if self.rollout_start_s is None or self.train_start_s is None:
            raise ValueError("a round ended that never started")
        total = max(train_end_s - self.rollout_start_s, 1e-9)
        first = self.train_start_s - self.rollout_start_s
        metrics = {
            "round/waiting_ratio_eq4": first / total,
            "round/waiting_ratio": max(0.0, total - self.compute_s) / total,
            "round/rollout_to_train_end_s": total,
            "round/first_dispatch_s": first,
        }
        self.rollout_start_s, self.train_start_s, self.compute_s = None, None, 0.0
        return metrics
