"""Writes a task's rows as prompt files: `python -m launch.tools.write_tasks arithmetic --out=data/arithmetic`.

Tasks are arithmetic (sums and differences below 100), word_problems (one to three steps) and code (small functions with
test cases). `configs/tasks/` defines their rows. The same task and seed give identical files.
"""

import pathlib

from absl import flags

from configs.tasks.catalog import TASKS, write_files
from launch import cli

_OUT = flags.DEFINE_string("out", None, "Folder for the files; default: data/TASK.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the rows.", lower_bound=0)
SHARED_FLAGS = ()


def main() -> int:
    """Writes each file atomically and prints its number of rows."""
    with cli.usage_errors():
        names = cli.given_arguments()
        if not names or names[0] not in TASKS:
            raise ValueError(f"expected a task, one of {', '.join(TASKS)}, got {names[0] if names else 'none'!r}")
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"data/{names[0]}").expanduser()
        for file, num_rows in write_files(names[0], out, seed=_SEED.value).items():
            print(f"{file}: {num_rows} rows")
    return 0


if __name__ == "__main__":
    cli.run(main, max_arguments=1)
