"""The answers that rows give themselves, for who judges them before a run starts."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from bridge.types import Task
from configs.sections import PromptsConfig
from learner.data.files import open_rows
from learner.data.problems import RawProblem
from learner.data.rows import RowFormat, parse_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldRow:
    """A row of a file, and how its answer is judged."""

    source: str
    """Name of its source; empty where there is one."""
    row: int
    """Counted from 1."""
    question: str
    task: Task
    """Its answer is the one that a right response gives; verifier code has a program in the metadata instead."""


def gold_rows(prompts: PromptsConfig, *, limit: int = 0) -> Iterator[GoldRow]:
    """The well-formed rows of all files and data sets, one source after the other.

    What is found to be wrong goes to `learner.data.prompts.load_prompts(set_aside=...)`. Evaluation files are not
    looked at: nothing is trained on them.

    Args:
      prompts: the run's.
      limit: so many rows of each source at most, spread over it; 0: all.

    Raises:
      ValueError: a file is unusable.
    """
    for name, source in prompts.sources.items():
        if not source.path or source.environment:
            continue
        form = RowFormat.of(prompts, source)
        rows = open_rows(source, form.columns)
        indices = range(len(rows))
        if 0 < limit < len(rows):
            indices = [int(i) for i in np.linspace(0, len(rows) - 1, limit)]
        for index in indices:
            row = rows[index]
            raw = parse_row(index + 1, row, form) if isinstance(row, dict) else None
            if isinstance(raw, RawProblem):
                yield GoldRow(source=name, row=raw.row, question=raw.question, task=raw.task)
