"""Registry of tasks and environment rows, and the writer of a task's prompt files."""

import dataclasses
import functools
import itertools
import json
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

from bridge.files import replace_file
from configs.tasks import arithmetic, calculator, code_functions, guess, textarena, word_problems
from configs.tasks.rows import Args, EpisodeRow, Turn

ROWS: dict[str, Callable[[int, Args], Callable[[int], EpisodeRow]]] = {
    guess.NAME: guess.rows,
    calculator.NAME: calculator.rows,
    textarena.NAME: textarena.rows,
}
"""Row generators by environment: (seed, arguments) to a function from index to row."""


EXAMPLES: dict[str, Callable[[EpisodeRow, random.Random], list[Turn]]] = {
    guess.NAME: guess.example,
    calculator.NAME: calculator.example,
}
"""Example episodes of a row by environment, for warming up a small model."""


Row = Callable[[int, int], dict[str, Any]]
"""Function from (seed, index) to a row of prompts."""


@dataclasses.dataclass(frozen=True)
class File:
    """Row function and size of one file."""

    row: Row
    num_rows: int
    """Number of rows. Exact for held-out files; training files also omit repeated prompts."""
    is_held_out: bool = False


_STEPS = {1: "one_step", 2: "two_steps", 3: "three_steps"}


TASKS: Mapping[str, Mapping[str, File]] = {
    "arithmetic": {
        "train": File(arithmetic.train_row, 20_000),
        "held_out": File(functools.partial(arithmetic.held_out_row, size=99), 256, is_held_out=True),
        "development": File(
            functools.partial(arithmetic.held_out_row, size=99, unseen=arithmetic.DEVELOPMENT), 252, is_held_out=True
        ),
        **{
            f"up_to_{size}": File(functools.partial(arithmetic.train_row, size=size), min(6_000, 200 * size))
            for size in arithmetic.SIZES
        },
        **{
            f"up_to_{size}_held_out": File(functools.partial(arithmetic.held_out_row, size=size), 64, is_held_out=True)
            for size in arithmetic.SIZES
        },
    },
    "code": {"train": File(code_functions.row, 20_000)},
    "word_problems": {
        **{
            name: File(functools.partial(word_problems.train_row, num_steps=steps), 20_000)
            for steps, name in _STEPS.items()
        },
        **{
            f"{name}_held_out": File(
                functools.partial(word_problems.held_out_row, num_steps=steps), 128, is_held_out=True
            )
            for steps, name in _STEPS.items()
        },
    },
}
"""Files by task and by name without suffix."""


def write_files(task: str, out: pathlib.Path, *, seed: int) -> dict[pathlib.Path, int]:
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
