"""Sets the training cost so that the serial baseline waits as long as in the paper."""

import dataclasses
from collections.abc import Callable

from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session

WAIT_WITHIN, MIN_PASSES = 0.03, 2.0
"""What a result warns of: a waiting ratio further off; fewer passes a micro-batch, so that padding costs too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The training cost found, and the session that had it."""

    passes_per_token: float
    wanted_ratio: float
    waiting_ratio: float
    """Of that session."""
    result: Result

    @property
    def passes_per_micro_batch(self) -> float:
        """Of that session; 1 is a micro-batch's own."""
        return self.result.num_passes / self.result.num_micro_batches

    def values(self) -> dict[str, float]:
        """For a bench's result."""
        return {
            "calibrated_waiting_ratio": self.waiting_ratio,
            "wanted_waiting_ratio": self.wanted_ratio,
            "calibrated_passes_per_micro_batch": self.passes_per_micro_batch,
        }

    def remarks(self) -> list[str]:
        """Warnings, for a bench's result."""
        found = []
        if abs(self.waiting_ratio - self.wanted_ratio) > WAIT_WITHIN:
            found.append(
                f"Warning: the calibration's last serial run waited {100 * self.waiting_ratio:.1f}% of its time, not "
                f"the {100 * self.wanted_ratio:.1f}% that the training cost was to give."
            )
        if self.passes_per_micro_batch < MIN_PASSES:
            found.append(
                f"Warning: {self.passes_per_micro_batch:.1f} gradient passes a micro-batch, fewer than "
                f"{MIN_PASSES:.0f}: training costs by the micro-batch here, padding and all, more than by the token."
            )
        return found


def calibrate_passes(
    rig: Rig, session: Callable[[float], Session], *, waiting_ratio: float, tolerance: float = 0.015, tries: int = 3
) -> Calibration:
    """Gradient passes per real token at which a serial run waits `waiting_ratio` of its rounds.

    A serial round's wait r does not depend on the training cost, so its compute must become r (1 - w) / w; each try
    scales the passes by what is missing.

    Args:
      rig: warm, so that nothing is compiled in here.
      session: a serial run for a number of passes per token.
      waiting_ratio: w, of RolloutPipe section 5.1.
      tolerance: of the ratio.
      tries: corrections at most.

    Returns:
      The run that came nearest; a cost that no run had is not taken.
    """
    passes, best = 0.0, None
    for _ in range(1 + tries):
        result = rig.run(session(passes))
        wait_s, compute_s = wait_and_compute_s(result)
        ratio = wait_s / (wait_s + compute_s)
        found = Calibration(passes_per_token=passes, wanted_ratio=waiting_ratio, waiting_ratio=ratio, result=result)
        if best is None or abs(ratio - waiting_ratio) < abs(best.waiting_ratio - waiting_ratio):
            best = found
        if abs(ratio - waiting_ratio) < tolerance:
            break
        done = result.num_passes / result.real_tokens
        passes = done * wait_s * (1 - waiting_ratio) / waiting_ratio / compute_s
    assert best is not None
    return best


def wait_and_compute_s(result: Result) -> tuple[float, float]:
    """Seconds the trainer waited and computed in a session's rounds, summed."""
    total = sum(r["round/rollout_to_train_end_s"] for r in result.rounds)
    wait = sum(r["round/rollout_to_train_end_s"] * r["round/waiting_ratio"] for r in result.rounds)
    return wait, total - wait
