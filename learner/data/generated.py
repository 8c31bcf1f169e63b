"""Generated prompt sources: reasoning-gym tasks and environments, with problem i a function of (seed, i).

`configs.tasks.catalog.ROWS`, or a custom function, has `rows(seed, args)`, which returns row i as a function of i. A
row is an object or mapping with `question` or `messages`, and optional `role`, `answer`, `metadata` and `rewards`.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from configs import custom_functions
from configs.sections.prompts import PromptSource
from configs.tasks.catalog import ROWS
from learner.data.conversations import NotARowError
from learner.data.parse_row import RowFormat, problem_of
from learner.data.problem import BadRow, Problem, RawProblem, task_of
from learner.data.source_context import OpenedSource, SourceContext, where

NUM_PROCEDURAL = 2**31 - 1
"""Number of indices per generated source. Different indices can give the same text."""


_BLOCKS = {"acre": 500, "gsm_symbolic": 10_000, "list_functions": 10_000, "word_ladder": 10_000}
"""Problems per data set block. These families precompute data for a whole data set, which takes memory and time, so
their problems come from consecutive blocks with a separate seed each."""


class ReasoningGymSource:
    """Reasoning-gym task: problem i is a function of (seed, i)."""

    def __init__(self, source: PromptSource, *, seed: int, where: str = "prompts") -> None:
        """Creates the first data set block; raises ValueError if the task is unknown or rejects its arguments."""
        # Imported here because it loads sympy and matplotlib, which runs with other sources do not need.
        import reasoning_gym

        self._block = _BLOCKS.get(source.task, NUM_PROCEDURAL)

        @functools.lru_cache(maxsize=2)
        def block(number: int) -> Any:
            drawn = seed if number == 0 else random.Random(f"{seed}.{number}").getrandbits(31)
            return reasoning_gym.create_dataset(source.task, size=self._block, seed=drawn, **source.task_args)

        try:
            block(0)
        except (ValueError, AssertionError, TypeError) as e:
            raise ValueError(f"{where}.task={source.task!r} with task_args {source.task_args}: {e}") from e
        self._dataset = block
        self._pattern = re.compile(source.pattern) if source.pattern else None
        self._source, self._where = source, where

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> RawProblem:
        """Returns problem `index`; raises ValueError if it lacks the pattern, or the answer that its verifier needs."""
        number, place = divmod(index, self._block)
        entry = self._dataset(number)[place]
        question = entry["question"]
        if self._pattern is not None:
            found = self._pattern.search(question)
            if found is None:
                raise ValueError(f"{self._where}.pattern {self._pattern.pattern!r} is not in {question!r}")
            question = found.group(1)
        source = self._source
        needs_entry = source.environment != "" or source.parts.keys() != {"math"}
        answer = entry["answer"]
        if answer is None and source.parts.keys() & {"math", "exact"}:
            raise ValueError(f"{self._where}.task={source.task!r} names no answers: use verifier=reasoning_gym")
        task = task_of(
            "" if answer is None else answer,
            source.parts,
            answer_in=source.answer_in,
            metadata=self._with_arguments(entry) if needs_entry else None,
            environment=source.environment,
            teacher=source.teacher,
        )
        return RawProblem(question, (), task)

    def _with_arguments(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Adds what the scoring may depend on. A composite's entry is of another task than these arguments."""
        is_own = entry["metadata"]["source_dataset"] == self._source.task
        return entry | {"task_args": dict(self._source.task_args)} if is_own and self._source.task_args else entry


_CUSTOM_ROWS = custom_functions.Signature(takes=("seed", "args"), returns="row i of prompts as a function of i")
_FIELDS = ("question", "messages", "role", "answer", "metadata", "rewards")


class EnvironmentSource:
    """Generated rows of an environment: row i is a function of (seed, i)."""

    def __init__(self, form: RowFormat, *, seed: int, where: str = "prompts") -> None:
        """Loads the row generator; raises ValueError if there is none or it rejects its arguments."""
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
        """Returns row `index` as a problem, or raises ValueError if it cannot be generated or is invalid."""
        try:
            return problem_of(0, _as_row(self._row(index), self._form.source), self._form)
        except NotARowError as e:
            raise ValueError(f"{self._said}: row {index}: {e}") from e


def _maker(source: PromptSource, where: str) -> Callable[[int, Mapping[str, Any]], Callable[[int], Any]]:
    if source.environment_rows:
        return custom_functions.load(f"{where}.environment_rows", source.environment_rows, _CUSTOM_ROWS)
    if source.environment not in ROWS:
        raise ValueError(f"it makes no rows; give {where}.environment_rows=module:function, or a {where}.path of rows")
    return ROWS[source.environment]


def _as_row(made: Any, source: PromptSource) -> dict[str, Any]:
    found = {n: made.get(n) if isinstance(made, Mapping) else getattr(made, n, None) for n in _FIELDS}
    prompt = found["question"]
    if found["messages"]:
        prompt = [dict(m) for m in found["messages"]]
    elif found["role"] not in (None, "user"):
        prompt = [{"role": found["role"], "content": found["question"]}]
    metadata = None if found["metadata"] is None else dict(found["metadata"])
    answer = None if found["answer"] == "" else found["answer"]  # 0 is a valid answer
    row = {source.prompt_field: prompt, source.answer_field: answer}
    return row | {"metadata": metadata, "rewards": found["rewards"]}


_EVAL_SEED = 1_000_003
_MAX_DRAWS = 200_000
MAX_BAD_IN_A_ROW = 2_000
"""Consecutive quarantined rows after which the generator is considered broken."""


class GeneratedProblems:
    """Training problems of a generated source, by index."""

    def __init__(self, made: ReasoningGymSource | EnvironmentSource, name: str, setting: SourceContext) -> None:
        self._made, self._name, self._setting = made, name, setting
        self._path = _source_text(where(name), setting.config.prompts.sources[name])

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> Problem | BadRow | None:
        """Returns problem `index`, a `BadRow` if it is invalid or does not fit, or None if it is held out."""
        index, max_tokens = int(index), self._setting.max_tokens
        raw = _make_row(self._made, index, self._path)
        if isinstance(raw, BadRow):
            return raw
        if self._setting.is_held_out(raw) or self._setting.is_evaluated(raw):
            return None
        problem = _tokenize(raw, index, self._name, self._setting, self._path)
        if isinstance(problem, BadRow):
            return problem
        size = problem.num_tokens
        if not 0 < size <= max_tokens:
            return BadRow.of_size(index, size, max_tokens=max_tokens, path=self._path)
        return problem


def open_generated(name: str, setting: SourceContext, *, num_held_out: int) -> OpenedSource:
    """Opens a generated source.

    Raises ValueError if the generator fails, no question can be trained on, or there are too few held-out problems.
    """
    source = setting.config.prompts.sources[name]
    if source.task and "format" in source.parts and not setting.config.rewards.format_pattern:
        raise ValueError(f"{where(name)}: verifier format requires rewards.format_pattern, since tasks have no pattern")
    held_out, bad = draw_held_out(
        source, setting, num_held_out, name=name, field=where(name), bound="evaluation.num_problems"
    )
    made = _make(source, setting, seed=_train_seed(setting.config.run.seed), field=where(name))
    problems = GeneratedProblems(made, name, setting)
    if not any(isinstance(problems[index], Problem) for index in range(MAX_BAD_IN_A_ROW)):
        first = _make_row(made, 0, "")
        raise ValueError(
            f"{_source_text(where(name), source)}: of its first {MAX_BAD_IN_A_ROW} questions none can be trained on: "
            f"{first.reason if isinstance(first, BadRow) else repr(first.question)} and the others are none, are held "
            "out by their hash (is it the same one each time?), or do not fit"
        )
    return OpenedSource(
        name=name,
        source=source,
        problems=problems,
        is_endless=True,
        held_out=tuple(held_out),
        bad=tuple(bad),
    )


def draw_held_out(
    source: PromptSource, setting: SourceContext, num_problems: int, *, name: str, field: str, bound: str
) -> tuple[list[Problem], list[BadRow]]:
    """Returns (distinct held-out problems, bad rows); the problems do not depend on the run's seed.

    Raises ValueError if there are too few problems, or a prompt is too long. Errors name the config fields `field`, of
    the source, and `bound`, which sets `num_problems`.
    """
    if num_problems == 0:
        return [], []
    made = _make(source, setting, seed=_EVAL_SEED, field=field)
    path = f"{_source_text(field, source)} (evaluation)"
    found: dict[str, Problem] = {}
    bad: list[BadRow] = []
    last_good = -1
    for index in range(_MAX_DRAWS):
        row = _make_row(made, index, path)
        if isinstance(row, RawProblem) and row.question not in found and setting.is_held_out(row):
            row = _tokenize(row, index, name, setting, path)
        if isinstance(row, BadRow):
            bad.append(row)
            check_bad_in_a_row(index - last_good, row)
            continue
        last_good = index
        if isinstance(row, Problem):
            found[row.question] = row
        if len(found) == num_problems:
            break
    else:
        raise ValueError(
            f"{_source_text(field, source)} has only {len(found)} distinct held-out problems in {_MAX_DRAWS} draws; "
            f"lower {bound} ({num_problems}) or widen its arguments"
        )
    longest = max(p.num_tokens for p in found.values())
    if longest > setting.max_tokens:
        raise ValueError(
            f"prompts of {_source_text(field, source)} have up to {longest} tokens; model.max_tokens less the tokens "
            f"of a response (sampling.max_response_tokens, or the set's max_tokens) leaves {setting.max_tokens}"
        )
    return list(found.values()), bad


def check_bad_in_a_row(num_bad: int, last: BadRow) -> None:
    """Raises ValueError if `num_bad` consecutive rows reach `MAX_BAD_IN_A_ROW`."""
    if num_bad >= MAX_BAD_IN_A_ROW:
        raise ValueError(
            f"{last.path}: {num_bad} consecutive rows were quarantined; the last, {last.row}: {last.reason}"
        )


def _make_row(made: ReasoningGymSource | EnvironmentSource, index: int, path: str) -> RawProblem | BadRow:
    try:
        return made[index]
    except Exception as e:  # library or custom code generates the rows and may raise anything
        return BadRow(index, str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}", path)


def _tokenize(raw: RawProblem, index: int, name: str, setting: SourceContext, path: str) -> Problem | BadRow:
    try:
        return setting.tokenize(raw, name)
    except ValueError as e:  # the chat template rejects the roles or their order
        return BadRow(index, str(e), path)


def _make(
    source: PromptSource, setting: SourceContext, *, seed: int, field: str
) -> ReasoningGymSource | EnvironmentSource:
    if source.task:
        return ReasoningGymSource(source, seed=seed, where=field)
    return EnvironmentSource(setting.form(source), seed=seed, where=field)


def _source_text(field: str, source: PromptSource) -> str:
    kind = f"task={source.task!r}" if source.task else f"environment={source.environment!r}"
    return f"{field}.{kind}"


def _train_seed(seed: int) -> int:
    """Returns a training seed that differs from the evaluation seed and is far from other runs' seeds."""
    # The library makes problem i from seed + i, so neighboring seeds would give the same problems, shifted by one.
    return 10_000_000 * (1 + seed)
