"""Sets the training cost so that the serial baseline waits as long as in the paper."""

from collections.abc import Callable

from tests.bench.rig.rig import Result, Rig
from tests.bench.rig.session import Session


def calibrate_passes(
    rig: Rig, session: Callable[[float], Session], *, waiting_ratio: float, tolerance: float = 0.015, tries: int = 3
) -> float:
    """Gradient passes per real token at which a serial run waits `waiting_ratio` of its rounds.

    A serial round's wait r does not depend on the training cost, so its compute must become r (1 - w) / w; each try
    scales the passes by what is missing.

    Args:
      rig: warm, so that nothing is compiled in here.
      session: a serial run for a number of passes per token.
      waiting_ratio: w, of RolloutPipe section 5.1.
      tolerance: of the ratio.
      tries: runs at most; the last one's correction is used, seen or not.
    """
    passes = 0.0
    for _ in range(1 + tries):
        result = rig.run(session(passes))
        wait_s, compute_s = wait_and_compute_s(result)
        if abs(wait_s / (wait_s + compute_s) - waiting_ratio) < tolerance:
            break
        done = result.num_passes / result.real_tokens
        passes = done * wait_s * (1 - waiting_ratio) / waiting_ratio / compute_s
    return passes


def wait_and_compute_s(result: Result) -> tuple[float, float]:
    """Seconds the trainer waited and computed in a session's rounds, summed."""
    total = sum(r["round/rollout_to_train_end_s"] for r in result.rounds)
    wait = sum(r["round/rollout_to_train_end_s"] * r["round/waiting_ratio"] for r in result.rounds)
    return wait, total - wait
