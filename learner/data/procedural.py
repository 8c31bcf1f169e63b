"""Sources that are made by index: reasoning-gym's tasks, and environments' own rows."""

from configs.sections.prompt_source import PromptSource
from learner.data.problems import BadRow, Problem, RawProblem
from learner.data.setting import Opened, Setting, where
from learner.data.sources.environment import EnvironmentSource
from learner.data.sources.reasoning_gym import NUM_PROCEDURAL, ReasoningGymSource

_EVAL_SEED = 1_000_003
_MAX_DRAWS = 200_000
MAX_BAD_IN_A_ROW = 2_000
"""Rows set aside with no good one between them; then what makes them is broken."""


class ProceduralProblems:
    """What is made by index; None where that is held out, a `BadRow` where it is none or does not fit."""

    def __init__(self, made: ReasoningGymSource | EnvironmentSource, name: str, setting: Setting) -> None:
        """Nothing is made yet."""
        self._made, self._name, self._setting = made, name, setting
        self._path = _said(where(name), setting.config.prompts.sources[name])

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> Problem | BadRow | None:
        """Problem `index`."""
        index, max_tokens = int(index), self._setting.max_tokens
        raw = _make_row(self._made, index, self._path)
        if isinstance(raw, BadRow):
            return raw
        if self._setting.is_held_out(raw) or self._setting.is_evaluated(raw):
            return None
        problem = _tokenize(raw, index, self._name, self._setting, self._path)
        if isinstance(problem, BadRow):
            return problem
        size = problem.prompt_tokens.size
        if not 0 < size <= max_tokens:
            return BadRow.of_size(index, size, max_tokens=max_tokens, path=self._path)
        return problem


def open_procedural(name: str, setting: Setting, *, num_held_out: int) -> Opened:
    """A source that is made by index.

    Raises:
      ValueError: it can't be made, or has too few held-out problems.
    """
    source = setting.config.prompts.sources[name]
    held_out, bad = draw_held_out(
        source, setting, num_held_out, name=name, field=where(name), bound="evaluation.num_problems"
    )
    made = _make(source, setting, seed=_train_seed(setting.config.run.seed), field=where(name))
    problems = ProceduralProblems(made, name, setting)
    if not any(isinstance(problems[index], Problem) for index in range(MAX_BAD_IN_A_ROW)):
        first = _make_row(made, 0, "")
        raise ValueError(
            f"{_said(where(name), source)}: of its first {MAX_BAD_IN_A_ROW} questions none can be trained on: "
            f"{first.reason if isinstance(first, BadRow) else repr(first.question)} and the others are none, are held "
            "out by their hash (is it the same one each time?), or do not fit"
        )
    return Opened(
        name=name,
        source=source,
        problems=problems,
        is_endless=True,
        held_out=tuple(held_out),
        bad=tuple(bad),
    )


def draw_held_out(
    source: PromptSource, setting: Setting, num_problems: int, *, name: str, field: str, bound: str
) -> tuple[list[Problem], list[BadRow]]:
    """Held-out problems of what is made by index, distinct and the same whatever the run's seed; and the bad rows.

    Args:
      source: what makes them.
      setting: the run's.
      num_problems: so many.
      name: the source's.
      field: of the config that describes the source.
      bound: the field that says how many.

    Raises:
      ValueError: there are too few, or a prompt is too long.
    """
    if num_problems == 0:
        return [], []
    made = _make(source, setting, seed=_EVAL_SEED, field=field)
    path = f"{_said(field, source)} (evaluation)"
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
            f"{_said(field, source)} has only {len(found)} distinct held-out problems in {_MAX_DRAWS} draws; lower "
            f"{bound} ({num_problems}) or widen its arguments"
        )
    longest = max(p.prompt_tokens.size for p in found.values())
    if longest > setting.max_tokens:
        raise ValueError(
            f"prompts of {_said(field, source)} have up to {longest} tokens; model.max_tokens less the tokens of a "
            f"response (sampling.max_response_tokens, or the set's max_tokens) leaves {setting.max_tokens}"
        )
    return list(found.values()), bad


def check_bad_in_a_row(num_bad: int, last: BadRow) -> None:
    """Refuses what makes nothing but bad rows.

    Raises:
      ValueError: so many were set aside one after the other.
    """
    if num_bad >= MAX_BAD_IN_A_ROW:
        raise ValueError(f"{last.path}: {num_bad} rows in a row were set aside; the last, {last.row}: {last.reason}")


def _make_row(made: ReasoningGymSource | EnvironmentSource, index: int, path: str) -> RawProblem | BadRow:
    try:
        return made[index]
    except ValueError as e:
        return BadRow(index, str(e), path)
    except Exception as e:  # a library's code, or the user's, makes rows
        return BadRow(index, f"{type(e).__name__}: {e}", path)


def _tokenize(raw: RawProblem, index: int, name: str, setting: Setting, path: str) -> Problem | BadRow:
    try:
        return setting.tokenize(raw, name)
    except ValueError as e:  # the chat template wants other roles, or another order of them
        return BadRow(index, str(e), path)


def _make(source: PromptSource, setting: Setting, *, seed: int, field: str) -> ReasoningGymSource | EnvironmentSource:
    if source.task:
        return ReasoningGymSource(source, seed=seed, where=field)
    return EnvironmentSource(setting.form(source), seed=seed, where=field)


def _said(field: str, source: PromptSource) -> str:
    kind = f"task={source.task!r}" if source.task else f"environment={source.environment!r}"
    return f"{field}.{kind}"


def _train_seed(seed: int) -> int:
    """Apart from the warm-up's and the evaluation's seeds, and from other runs'.

    The library makes problem i from seed + i, so neighbouring seeds would give the same problems, shifted by one.
    """
    return 10_000_000 * (1 + seed)
