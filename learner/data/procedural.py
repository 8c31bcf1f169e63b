"""Sources that are made by index: reasoning-gym's tasks, and environments' own rows."""

from configs.sections.prompt_source import PromptSource
from learner.data.problems import Problem
from learner.data.setting import Opened, Setting, where
from learner.data.sources.environment import EnvironmentSource
from learner.data.sources.reasoning_gym import NUM_PROCEDURAL, ReasoningGymSource

_EVAL_SEED = 1_000_003
_MAX_DRAWS = 200_000
_MAX_TRIED = 2_000


class ProceduralProblems:
    """What is made by index; None where that is held out or does not fit."""

    def __init__(self, made: ReasoningGymSource | EnvironmentSource, name: str, setting: Setting) -> None:
        """Nothing is made yet."""
        self._made, self._name, self._setting = made, name, setting

    def __len__(self) -> int:
        return NUM_PROCEDURAL

    def __getitem__(self, index: int) -> Problem | None:
        """Problem `index`."""
        raw = self._made[int(index)]
        if self._setting.is_held_out(raw) or self._setting.is_evaluated(raw):
            return None
        problem = self._setting.tokenize(raw, self._name)
        return problem if 0 < problem.prompt_tokens.size <= self._setting.max_tokens else None


def open_procedural(name: str, setting: Setting, *, num_held_out: int) -> Opened:
    """A source that is made by index.

    Raises:
      ValueError: it can't be made, or has too few held-out problems.
    """
    source = setting.config.prompts.sources[name]
    held_out = tuple(draw_held_out(name, setting, num_held_out))
    made = _make(name, setting, seed=_train_seed(setting.config.run.seed))
    problems = ProceduralProblems(made, name, setting)
    if all(problems[index] is None for index in range(_MAX_TRIED)):
        raise ValueError(
            f"{_field(name, source)}: of its first {_MAX_TRIED} questions none can be trained on: {made[0].question!r} "
            "and the others are held out by their hash (is it the same one each time?), or do not fit"
        )
    return Opened(
        name=name,
        source=source,
        problems=problems,
        is_endless=True,
        held_out=held_out,
    )


def draw_held_out(name: str, setting: Setting, num_problems: int) -> list[Problem]:
    """Held-out problems of what is made by index: distinct, and the same whatever the run's seed.

    Raises:
      ValueError: there are too few, or a prompt is too long.
    """
    if num_problems == 0:
        return []
    source, config = setting.config.prompts.sources[name], setting.config
    made = _make(name, setting, seed=_EVAL_SEED)
    found: dict[str, Problem] = {}
    for index in range(_MAX_DRAWS):
        raw = made[index]
        if raw.question not in found and setting.is_held_out(raw):
            found[raw.question] = setting.tokenize(raw, name)
        if len(found) == num_problems:
            break
    else:
        raise ValueError(
            f"{_field(name, source)} has only {len(found)} distinct held-out problems in {_MAX_DRAWS} draws; lower "
            f"evaluation.num_problems ({config.evaluation.num_problems}) or widen its arguments"
        )
    longest = max(p.prompt_tokens.size for p in found.values())
    if longest > setting.max_tokens:
        raise ValueError(
            f"prompts of {_field(name, source)} have up to {longest} tokens; model.max_tokens - "
            f"sampling.max_response_tokens leaves {setting.max_tokens}"
        )
    return list(found.values())


def _make(name: str, setting: Setting, *, seed: int) -> ReasoningGymSource | EnvironmentSource:
    source = setting.config.prompts.sources[name]
    if source.task:
        return ReasoningGymSource(source, seed=seed, where=where(name))
    return EnvironmentSource(setting.form(source), seed=seed, where=where(name))


def _field(name: str, source: PromptSource) -> str:
    kind = f"task={source.task!r}" if source.task else f"environment={source.environment!r}"
    return f"{where(name)}.{kind}"


def _train_seed(seed: int) -> int:
    """Apart from the warm-up's and the evaluation's seeds, and from other runs'.

    The library makes problem i from seed + i, so neighbouring seeds would give the same problems, shifted by one.
    """
    return 10_000_000 * (1 + seed)
