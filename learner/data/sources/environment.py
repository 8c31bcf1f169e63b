"""The rows that an environment makes itself: endless, by index. No environment is loaded here, only what makes rows.

`configs/environments/NAME.py` has `rows(seed, args)`, which returns row i as a function of i; a user's own function is
alike. A row is an object or a mapping with a `question` (or `messages`), and, as there are, `role`, `answer`,
`metadata` and `rewards`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from configs import extension
from configs.sections.prompt_source import PromptSource
from learner.data.problems import RawProblem
from learner.data.rows import NotARowError, RowFormat, problem_of
from learner.data.sources.reasoning_gym import NUM_PROCEDURAL

ROWS = extension.Signature(takes=("seed", "args"), returns="row i of prompts as a function of i")

_FIELDS = ("question", "messages", "role", "answer", "metadata", "rewards")


class EnvironmentSource:
    """Row i of an environment is a function of (seed, i)."""

    def __init__(self, form: RowFormat, *, seed: int, where: str = "prompts") -> None:
        """Finds what makes the rows; `where` is the source's field of the config.

        Raises:
          ValueError: nothing makes rows for this environment, or it refuses its arguments.
        """
        source = form.source
        self._form = dataclasses.replace(form, rewards_field="rewards", metadata_field="metadata")
        self._said = f"{where}.environment={source.environment} with environment_args {source.environment_args}"
        try:
            self._row = _maker(source, where)(seed, source.environment_args)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{self._said}: {e}") from e

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> RawProblem:
        """Row `index`.

        Raises:
          ValueError: it can't be made, or is none.
        """
        try:
            return problem_of(0, _as_row(self._row(index), self._form.source), self._form)
        except NotARowError as e:
            raise ValueError(f"{self._said}: row {index}: {e}") from e


def _maker(source: PromptSource, where: str) -> Callable[[int, Mapping[str, Any]], Callable[[int], Any]]:
    if source.environment_rows:
        return extension.load(f"{where}.environment_rows", source.environment_rows, ROWS)
    module = f"configs.environments.{source.environment}"
    try:
        return importlib.import_module(module).rows
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # one of its own imports
    raise ValueError(f"it makes no rows; give {where}.environment_rows=module:function, or a {where}.path of rows")


def _as_row(made: Any, source: PromptSource) -> dict[str, Any]:
    """The fields of a file's row."""
    found = {n: made.get(n) if isinstance(made, Mapping) else getattr(made, n, None) for n in _FIELDS}
    prompt = found["question"]
    if found["messages"]:
        prompt = [dict(m) for m in found["messages"]]
    elif found["role"] not in (None, "user"):
        prompt = [{"role": found["role"], "content": found["question"]}]
    metadata = None if found["metadata"] is None else dict(found["metadata"])
    answer = None if found["answer"] == "" else found["answer"]  # 0 is one
    row = {source.prompt_field: prompt, source.answer_field: answer}
    return row | {"metadata": metadata, "rewards": found["rewards"]}
