"""Files of rows, configs and tokenizers of the tests of prompts."""

import json
from typing import Any

import pyarrow
import pyarrow.parquet

from configs import schema, sections
from learner.data.parse_row import RowFormat

TWO_TERMS: dict[str, Any] = dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2)
SUMS: dict[str, Any] = dict(task="chain_sum", task_args=TWO_TERMS, pattern=r":\s*(.*=)")


def jsonl(folder, rows, name="rows.jsonl"):
    file = folder / name
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(file)


def parquet(folder, rows, name="rows.parquet", **how):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, **how)
    return str(folder / name)


def config_of(*, num_problems=20, max_tokens=64, seed=0, num_updates=1, **prompts):
    return schema.Config(
        preset="test",
        run=sections.RunConfig(seed=seed, num_updates=num_updates),
        prompts=sections.PromptsConfig(**prompts),
        model=sections.ModelConfig(max_tokens=max_tokens),
        rounds=sections.RoundsConfig(groups_per_round=1, groups_per_update=1),
        evaluation=sections.EvaluationConfig(num_problems=num_problems),
        publish=sections.PublishConfig(probe_every_n_publishes=10 if num_problems else 0),
    )


def form_of(**prompts):
    """How the rows of a file are read."""
    config = sections.PromptsConfig(path="rows.jsonl", **prompts)
    return RowFormat.of(config, config.sources[""])


def rows_of(count, *, start=0):
    return [{"prompt": f"what is {n} + {n}?", "answer": 2 * n} for n in range(start, start + count)]


def take(stream, count):
    return [next(stream).question for _ in range(count)]
