"""Writer of the prompt files of a task in `configs/tasks`, as JSON lines."""

import itertools
import json
import pathlib

from bridge.files import replace_file
from configs.tasks.catalog import TASKS, File


def write(task: str, out: pathlib.Path, *, seed: int) -> dict[pathlib.Path, int]:
    """Writes a task's files into a folder; returns the number of rows per file."""
    out.mkdir(parents=True, exist_ok=True)
    written: dict[pathlib.Path, int] = {}
    for name, file in TASKS[task].items():
        lines = _lines(file, seed)
        path = out / f"{name}.jsonl"
        replace_file(path, "".join(line + "\n" for line in lines).encode())
        written[path] = len(lines)
    return written


def _lines(file: File, seed: int) -> list[str]:
    rows: dict[str, str] = {}
    for index in itertools.count() if file.is_held_out else range(file.num_rows):
        row = file.row(seed, index)
        rows.setdefault(row["prompt"], json.dumps(row))
        if len(rows) == file.num_rows:
            break
    return [*rows.values()]
