"""Sets the training cost so that the serial baseline waits as long as in the paper."""

import dataclasses
from collections.abc import Callable, Mapping

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
        ratio = measured_ratio(result)
        found = Calibration(passes_per_token=passes, wanted_ratio=waiting_ratio, waiting_ratio=ratio, result=result)
        if best is None or abs(ratio - waiting_ratio) < abs(best.waiting_ratio - waiting_ratio):
            best = found
        if abs(ratio - waiting_ratio) < tolerance:
            break
        wait_s, compute_s = wait_and_compute_s(result)
        done = result.num_passes / result.real_tokens
        passes = done * wait_s * (1 - waiting_ratio) / waiting_ratio / compute_s
    assert best is not None
    return best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """Serial runs of several sizes, all at one training cost."""

    passes_per_token: float
    results: Mapping[int, Result]
    """By size."""
    num_repeats: int
    """How often all of them were run again, at a corrected cost."""

    @property
    def waiting_ratios(self) -> dict[int, float]:
        """By size."""
        return {size: measured_ratio(result) for size, result in self.results.items()}

    def remarks(self, bounds: tuple[float, float]) -> list[str]:
        """What a result has to say of it: nothing if the first try was within the bounds."""
        low, high = bounds
        wanted = f"{100 * low:.0f} to {100 * high:.0f}% of its time"
        off = [f"{100 * w:.1f}% at {size}" for size, w in self.waiting_ratios.items() if not low <= w <= high]
        if off:
            return [
                f"Warning: in {1 + self.num_repeats} tries serial never waited {wanted} at every size; it waited "
                f"{', '.join(off)} in the nearest one, which counts."
            ]
        return [f"Serial waited {wanted} in try number {1 + self.num_repeats}; that one counts."] * bool(
            self.num_repeats
        )


def baseline_within(
    rig: Rig,
    sessions: Mapping[int, Callable[[float], Session]],
    *,
    passes_per_token: float,
    bounds: tuple[float, float],
    repeats: int = 2,
) -> Baseline:
    """Serial runs whose waiting ratio lies within the bounds at every size, if a bounded number of tries finds them.

    A calibration is one run, and the next may wait some percent more or less. So the measured runs themselves are
    looked at: if one is out of bounds, the cost is corrected by what all of them waited, and all are run again.

    Args:
      rig: warm.
      sessions: by size, a serial run for a number of passes per token.
      passes_per_token: of the first try.
      bounds: the lowest and the highest waiting ratio; the middle is aimed at.
      repeats: tries after the first, at most.

    Returns:
      The last try, or the one that came nearest if none is within.
    """
    middle = sum(bounds) / 2
    best, passes = None, passes_per_token
    for repeat in range(1 + repeats):
        results = {size: rig.run(session(passes)) for size, session in sessions.items()}
        found = Baseline(passes_per_token=passes, results=results, num_repeats=repeat)
        if best is None or _worst(found, middle) < _worst(best, middle):
            best = found
        if all(bounds[0] <= w <= bounds[1] for w in found.waiting_ratios.values()):
            return found
        waits, computes = zip(*map(wait_and_compute_s, results.values()), strict=True)
        passes *= sum(waits) * (1 - middle) / middle / sum(computes)
    assert best is not None
    return dataclasses.replace(best, num_repeats=repeats)


def _worst(baseline: Baseline, middle: float) -> float:
    return max(abs(w - middle) for w in baseline.waiting_ratios.values())


def measured_ratio(result: Result) -> float:
    """Of a session's rounds together (RolloutPipe, section 5.1)."""
    wait_s, compute_s = wait_and_compute_s(result)
    return wait_s / (wait_s + compute_s)


def wait_and_compute_s(result: Result) -> tuple[float, float]:
    """Seconds the trainer waited and computed in a session's rounds, summed."""
    return sum(r["round/wait_s"] for r in result.rounds), sum(r["round/compute_s"] for r in result.rounds)
