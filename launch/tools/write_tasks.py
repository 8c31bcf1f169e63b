"""Writes a task's rows as files of prompts: `python -m launch.tools.write_tasks arithmetic --out=data/arithmetic`.

Tasks are arithmetic (sums and differences below a hundred), word_problems (of one to three steps) and code (small
functions with test cases); `configs/tasks/` has what their rows are. The same task and seed give the same bytes.
"""

import pathlib

from absl import flags

from configs.tasks.catalog import TASKS
from launch import cli
from launch.tools.task_files import write

_OUT = flags.DEFINE_string("out", None, "The folder that gets the files; data/TASK if not given.")
_SEED = flags.DEFINE_integer("seed", 0, "Other rows for each.", lower_bound=0)
SHARED_FLAGS = ()


def main() -> int:
    """Writes them, each whole or not at all."""
    with cli.usage_errors():
        names = cli.given_arguments()
        if not names or names[0] not in TASKS:
            raise ValueError(f"give a task, one of {', '.join(TASKS)}, got {names[0] if names else 'none'!r}")
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"data/{names[0]}").expanduser()
        for file, num_rows in write(names[0], out, seed=_SEED.value).items():
            print(f"{file}: {num_rows} rows")
    return 0


if __name__ == "__main__":
    cli.run(main, max_arguments=1)
