"""Writes a task's rows as files of prompts: `python -m launch.write_tasks arithmetic --out=data/arithmetic`.

Tasks are arithmetic (sums and differences of two digits) and word_problems (of one to three steps), as
configs/recipes trains them; `configs/tasks/` has what their rows are. The same task and seed give the same bytes.
"""

import itertools
import json
import pathlib

from absl import flags

from bridge.files import replace_file
from configs.tasks.shipped import TASKS, File
from launch import command_line

_OUT = flags.DEFINE_string("out", None, "The folder that gets the files; data/TASK if not given.")
_SEED = flags.DEFINE_integer("seed", 0, "Other rows for each.", lower_bound=0)


def main() -> int:
    """Writes them, each whole or not at all."""
    with command_line.usage_errors():
        names = command_line.given_arguments()
        if not names or names[0] not in TASKS:
            raise ValueError(f"give a task, one of {', '.join(TASKS)}, got {names[0] if names else 'none'!r}")
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"data/{names[0]}").expanduser()
        for file, num_rows in write(names[0], out, seed=_SEED.value).items():
            print(f"{file}: {num_rows} rows")
    return 0


def write(task: str, out: pathlib.Path, *, seed: int) -> dict[pathlib.Path, int]:
    """Writes a task's files into a folder; how many rows each has.

    Raises:
      OSError: nothing can be written there.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: dict[pathlib.Path, int] = {}
    for name, file in TASKS[task].items():
        lines = _lines(file, seed)
        path = out / f"{name}.jsonl"
        replace_file(path, "".join(line + "\n" for line in lines).encode())
        written[path] = len(lines)
    return written


def _lines(file: File, seed: int) -> list[str]:
    """Rows of different prompts."""
    rows: dict[str, str] = {}
    for index in itertools.count() if file.is_held_out else range(file.num_rows):
        row = file.row(seed, index)
        rows.setdefault(row["prompt"], json.dumps(row))
        if len(rows) == file.num_rows:
            break
    return [*rows.values()]


if __name__ == "__main__":
    command_line.run(main, max_arguments=1)
