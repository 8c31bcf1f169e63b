"""The rig's gradient helper: the real one on one core, whose steps cost as much as the learner's.

python -m tests.bench.rig.helper_process --run_dir=FOLDER --pipe=FD      (started by learner_process.py)
"""

import os
from typing import Any
from unittest import mock

CORE, PASSES = "BENCH_HELPER_CORE", "BENCH_HELPER_PASSES_PER_TOKEN"
if __name__ == "__main__":
    os.sched_setaffinity(0, {int(os.environ[CORE])})  # before jax counts its cores

from launch import cli  # noqa: E402
from tests.bench.rig.paced_steps import PacedSteps  # noqa: E402


def paced(model_config: Any, config: Any, mesh: Any) -> PacedSteps:
    """Returns steps of the learner's pace."""
    steps = PacedSteps(model_config, config, mesh)
    steps.set_pace(float(os.environ[PASSES]))
    return steps


if __name__ == "__main__":
    from launch import gradient_helper  # defines flags, so not where a test imports this file

    with mock.patch("learner.gradient_helper.helper_worker.build_train_step", paced):
        cli.run(gradient_helper.main)
