"""A learner that kills itself (SIGKILL) between two passes over a batch, at the update after STEP.

python -m tests.integration.support.dying_learner STEP EPOCH --config=... (the rest is launch.learner's)
"""

import os
import runpy
import signal
import sys

from learner.update.optimizer import Metrics, TrainState
from learner.update.train_step import TrainStep

_apply = TrainStep.apply


def main() -> None:
    """Runs launch.learner until the optimizer step before pass EPOCH is made."""
    step, epoch = int(sys.argv.pop(1)), int(sys.argv.pop(1))

    def apply(self: TrainStep, state: TrainState, number: int = 0) -> tuple[TrainState, Metrics]:
        is_last = (int(state.step), number) == (step, epoch - 1)
        result = _apply(self, state, number)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(TrainStep, "apply", apply)  # noqa: B010  # it is a method of another signature to pyright
    runpy.run_module("launch.learner", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
