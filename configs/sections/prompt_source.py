"""One source of problems: rows of a file or of a data set, a reasoning-gym task, or an environment."""

import dataclasses
import re
from typing import Literal

from configs import extension
from configs.checks import CountOrZero, Finite, Weight, check_ranges
from configs.paths import LocalPath, expand_home

VERIFIERS = ("reasoning_gym", "exact", "math", "format", "code", "judge")

READS_ANSWERS = ("reasoning_gym", "exact", "math")
"""Those of them that say which answer a response gives, by which responses vote (maj@k)."""

HUGGING_FACE = "hf:"
"""Before the name of a data set of the Hub, or a folder in its format."""

PlainArgs = dict[str, int | Finite | str | bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFields:
    """Fields of one source of problems, which `prompts`, a mixture's sources and evaluation sets have alike."""

    path: LocalPath = ""
    """A .jsonl, .parquet or .arrayrecord file (of the last several: a pattern with `*`), or `hf:` and the name of a
    data set of the Hugging Face Hub or a folder in its format. Empty: problems are those of the task or of the
    environment."""
    subset: str = ""
    """Of a Hugging Face data set, as "main" of openai/gsm8k; empty: its default."""
    split: str = "train"
    """Of a Hugging Face data set."""
    revision: str = ""
    """Of a Hugging Face data set: a branch, tag or commit; empty: the newest."""
    eval_path: LocalPath = ""
    """Held-out problems; empty: one in `prompts.held_out_one_in`, chosen by a hash of the prompt."""
    eval_split: str = ""
    """Held-out problems: another split of the same Hugging Face data set."""
    task: str = ""
    """A reasoning-gym task family."""
    task_args: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    environment: str = ""
    """Name of the environment that each problem is an episode of. Without a path its own rows are asked. It rewards by
    itself: a verifier judges only where a source of a mixture names one, `rewards` are added."""
    environment_args: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    """What the environment's own rows are made with."""
    environment_rows: str = ""
    """`module:function` of the user's own that makes the rows, in place of those of configs/environments."""
    pattern: str = ""
    """A regular expression whose first group is the part of a task's question to show; empty shows it all."""
    rewards: dict[str, Finite] = dataclasses.field(default_factory=dict[str, float])
    """Instead of one verifier several, by name, and what each one's score counts: the reward is their weighted sum. A
    row of a file may have its own (`prompts.rewards_field`)."""

    def __post_init__(self) -> None:
        expand_home(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSource(SourceFields):
    """Where problems come from, how they are judged, and how often they come; what is empty is as `prompts` has it.

    Problems are the rows of `path`, or those of `task`, or, without either, those that `environment` makes itself.
    """

    prompt_field: str = ""
    answer_field: str = ""
    verifier: str = ""
    """Who judges the rows that name no rewards of their own."""
    answer_in: Literal["", "conclusion", "text", "number"] = ""
    weight: Weight = 1.0
    """How often a problem is of this source, against the other weights."""
    stage: CountOrZero = 0
    """With prompts.curriculum=stages: when this source's time comes."""

    @property
    def parts(self) -> dict[str, float]:
        """By verifier, what its score counts of a row that doesn't say; empty where the environment alone rewards."""
        return self.rewards or ({self.verifier: 1.0} if self.verifier else {})

    @property
    def is_hugging_face(self) -> bool:
        """Whether `path` is read by the Hugging Face library."""
        return self.path.startswith(HUGGING_FACE)

    def check(self, where: str) -> None:
        """Refuses what is no one source; `where` is its field of the config.

        Raises:
          ValueError: names the field.
        """
        if self.path and self.task:
            raise ValueError(f"{where}.path and {where}.task are two sources; give one, or a mixture of both")
        if not (self.path or self.task or self.environment):
            raise ValueError(f"{where} wants a path, a task or an environment")
        check_ranges(where, self)
        check_parts(where, self.verifier, self.rewards)
        self._check_judges(where)
        self._check_fields_have_effect(where)
        check_pattern(f"{where}.pattern", self.pattern)

    def _check_judges(self, where: str) -> None:
        if not self.parts and not self.environment:
            raise ValueError(f"{where} needs a verifier, or rewards")
        if "reasoning_gym" in self.parts and not self.task:
            raise ValueError(
                f"{where}.verifier=reasoning_gym needs a reasoning-gym task; for {where}.path use exact or math"
            )

        if "code" in self.parts and self.task:
            raise ValueError(
                f"{where}.verifier=code needs rows with test cases ({where}.path), got {where}.task={self.task}"
            )

    def _check_fields_have_effect(self, where: str) -> None:
        of_hub = {n: getattr(self, n) for n in ("subset", "revision", "eval_split")}
        if not self.is_hugging_face and (self.split != "train" or any(of_hub.values())):
            raise ValueError(
                f"{where}.subset, split, revision and eval_split are of a Hugging Face data set (path=hf:NAME), got "
                f"{where}.path={self.path!r}"
            )
        if self.eval_path and self.eval_split:
            raise ValueError(f"{where}.eval_path and {where}.eval_split both say what is held out; give one")
        if self.eval_path and not self.path:
            raise ValueError(f"{where}.eval_path needs {where}.path: a task makes its own held-out problems")
        makes_rows = self.environment and not (self.path or self.task)
        if (self.environment_args or self.environment_rows) and not makes_rows:
            raise ValueError(
                f"{where}.environment_args and {where}.environment_rows need an environment that makes its own rows "
                f"({where}.environment without a path or a task)"
            )
        if self.environment_rows:
            extension.check_name(f"{where}.environment_rows", self.environment_rows, ())


def check_parts(where: str, verifier: str, rewards: dict[str, float]) -> None:
    """Refuses verifiers that nobody has, and weights that count nothing.

    Raises:
      ValueError: names the field.
    """
    if verifier:
        extension.check_name(f"{where}.verifier", verifier, VERIFIERS)
    for name, weight in rewards.items():
        extension.check_name(f"{where}.rewards", name, VERIFIERS)
        if weight == 0:
            raise ValueError(f"{where}.rewards.{name} must not be 0; leave {name} out")


def check_pattern(where: str, pattern: str) -> None:
    """Refuses what is no regular expression with a group.

    Raises:
      ValueError: names the field.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as e:
        raise ValueError(f"{where} is no regular expression: {e}") from e
    if pattern and groups < 1:
        raise ValueError(f"{where} needs a group in parentheses, got {pattern!r}")
