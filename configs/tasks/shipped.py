"""The tasks that `launch.write_tasks` writes, by name: their files, and who makes each one's rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from configs.tasks import arithmetic, word_problems

Row = Callable[[int, int], dict[str, Any]]
"""(seed, index) to a row of prompts."""


@dataclasses.dataclass(frozen=True)
class File:
    """One file of rows."""

    row: Row
    num_rows: int
    """At most this many to train on, less those whose prompt was there before; of held-out ones exactly as many."""
    is_held_out: bool = False


_STEPS = {1: "one_step", 2: "two_steps", 3: "three_steps"}

TASKS: Mapping[str, Mapping[str, File]] = {
    "arithmetic": {
        "train": File(arithmetic.train_row, 20_000),
        "held_out": File(arithmetic.held_out_row, 256, is_held_out=True),
    },
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
"""By task and file, without its ending."""
