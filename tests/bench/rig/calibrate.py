"""Sets the training cost so that serial runs wait as long as in the paper."""

import dataclasses
from collections.abc import Mapping

from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session

MIN_PASSES = 2.0
"""Passes per micro-batch; with fewer, training costs by the micro-batch, padding and all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The training cost found, and the serial runs that had it."""

    passes_per_token: float
    bounds: tuple[float, float]
    """Of the waiting ratio."""
    results: Mapping[str, Result]
    num_tries: int = 1

    @property
    def middle(self) -> float:
        return sum(self.bounds) / 2

    @property
    def waiting_ratio(self) -> float:
        """The ratio that is furthest from the middle."""
        return max(map(waiting_ratio, self.results.values()), key=lambda ratio: abs(ratio - self.middle))

    @property
    def is_within(self) -> bool:
        low, high = self.bounds
        return low <= self.waiting_ratio <= high

    @property
    def passes_per_micro_batch(self) -> float:
        """1 is a micro-batch's own."""
        results = self.results.values()
        return sum(r.num_passes for r in results) / sum(r.num_micro_batches for r in results)

    def values(self) -> dict[str, float]:
        return {
            "calibrated_waiting_ratio": self.waiting_ratio,
            "wanted_waiting_ratio": self.middle,
            "calibrated_passes_per_micro_batch": self.passes_per_micro_batch,
        }

    def notes(self) -> list[str]:
        """Returns the cost, and warnings."""
        found = [
            f"Training costs {1000 * self.passes_per_token:.1f} gradient passes per 1000 tokens, set in "
            f"{self.num_tries} tries; serial then waited {self.waiting_ratio:.1%} of its time."
        ]
        if not self.is_within:
            found.append(f"Warning: serial was to wait {self.bounds[0]:.1%} to {self.bounds[1]:.1%}.")
        if self.passes_per_micro_batch < MIN_PASSES:
            found.append(
                f"Warning: {self.passes_per_micro_batch:.1f} gradient passes a micro-batch, fewer than "
                f"{MIN_PASSES:.0f}: training costs by the micro-batch here, padding and all, more than by the token."
            )
        return found


def calibrate(
    rig: Rig,
    sessions: Mapping[str, Session],
    *,
    bounds: tuple[float, float],
    passes_per_token: float = 0.0,
    tries: int = 4,
) -> Calibration:
    """Returns the cost at which serial runs wait a share of their rounds within the bounds, or come nearest.

    A serial round's wait r does not depend on the training cost, so its compute must become r (1 - w) / w for a ratio w
    (RolloutPipe section 5.1). Each of at most `tries` scales the passes by what is missing of the middle of the bounds.
    The rig must be warm, so that nothing is compiled in here.
    """
    best = None
    for number in range(tries):
        results = {
            name: rig.run(dataclasses.replace(session, passes_per_token=passes_per_token))
            for name, session in sessions.items()
        }
        found = Calibration(passes_per_token=passes_per_token, bounds=bounds, results=results)
        if best is None or abs(found.waiting_ratio - found.middle) < abs(best.waiting_ratio - best.middle):
            best = found
        if found.is_within:
            return dataclasses.replace(found, num_tries=number + 1)
        waits, computes = zip(*map(wait_and_compute_s, results.values()), strict=True)
        done = sum(r.num_passes for r in results.values()) / sum(r.real_tokens for r in results.values())
        passes_per_token = done * sum(waits) * (1 - found.middle) / found.middle / sum(computes)
    assert best is not None
    return dataclasses.replace(best, num_tries=tries)


def waiting_ratio(result: Result) -> float:
    """Returns the ratio of a session's rounds together (RolloutPipe section 5.1)."""
    wait_s, compute_s = wait_and_compute_s(result)
    return wait_s / (wait_s + compute_s)


def wait_and_compute_s(result: Result) -> tuple[float, float]:
    """Returns the seconds that the trainer waited and computed in a session's rounds."""
    return sum(r["round/wait_s"] for r in result.rounds), sum(r["round/compute_s"] for r in result.rounds)
