"""Gradient helper of a learner, which starts it: `python -m launch.gradient_helper --run_dir=FOLDER --pipe=FD`.

It trains on engines' devices while a round's last responses run (`learner/gradient_helper`).
"""

import pathlib
from multiprocessing.connection import Connection

from absl import flags, logging

from bridge.device_turns import HELPER, TrainerTurn
from launch import cli
from launch.startup import prepare_run
from launch.supervision.placement import bind_to_cores, core_ids
from launch.supervision.process_tree import die_with_parent

_PIPE = flags.DEFINE_integer("pipe", None, "File descriptor of the pipe to the learner.")
_CPU_CORES = flags.DEFINE_string("cpu_cores", "", 'Cores of this process, as in "0-3". Empty: all.')
SHARED_FLAGS = ("run_dir",)
"""Shared flags that this command accepts."""


def main() -> int:
    """Answers the learner until it closes the pipe; returns 0."""
    die_with_parent()
    cli.log_to_stderr()
    with cli.usage_errors():
        if flags.FLAGS.run_dir is None or _PIPE.value is None:
            raise ValueError("a learner starts this command by itself (helpers.num_engines)")
        prepared = prepare_run.open_prepared(cli.run_dirs(most=1)[0])
    if _CPU_CORES.value:
        bind_to_cores(core_ids(_CPU_CORES.value))
    from learner.gradient_helper.helper_worker import HelperWorker

    folder = pathlib.Path(prepared.folder)
    worker = HelperWorker(
        prepared.config, folder, prepared.model_folder, TrainerTurn(folder, HELPER), Connection(_PIPE.value)
    )
    logging.info("gradient helper ready")
    worker.run()
    return 0


if __name__ == "__main__":
    cli.run(main)
