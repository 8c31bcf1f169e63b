"""Prompt sources: data, verifiers, curriculum, mixture."""

import dataclasses
import datetime
import re
from typing import Literal, TypeVar

from bridge.text.chat_template import RENDERED, TemplateSettings
from configs import custom_functions
from configs.sections.base import (
    Count,
    CountOrZero,
    Finite,
    FractionOrZero,
    LocalPath,
    Weight,
    check_pattern,
    check_ranges,
    expand_home,
)

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
    """`module:function` of the user's own that makes the rows, in place of those of configs/tasks."""
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
        check_pattern(f"{where}.pattern", self.pattern, needs_group=bool(self.pattern))

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
            custom_functions.check_name(f"{where}.environment_rows", self.environment_rows, ())


def check_parts(where: str, verifier: str, rewards: dict[str, float]) -> None:
    """Refuses verifiers that nobody has, and weights that count nothing.

    Raises:
      ValueError: names the field.
    """
    if verifier:
        custom_functions.check_name(f"{where}.verifier", verifier, VERIFIERS)
    for name, weight in rewards.items():
        custom_functions.check_name(f"{where}.rewards", name, VERIFIERS)
        if weight == 0:
            raise ValueError(f"{where}.rewards.{name} must not be 0; leave {name} out")


Source = TypeVar("Source", bound=PromptSource)
Truncated = Literal["zero", "keep", "mask"]


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


_OF_ONE_SOURCE = (
    "path", "subset", "split", "revision", "eval_path", "eval_split", "environment", "environment_args",
    "environment_rows",
)  # fmt: skip
"""Fields that a mixture's sources have instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig(SourceFields):
    """Where problems come from and how answers are judged."""

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    rewards_field: str = "rewards"
    """A row's own verifiers: a list of {name, weight}. Empty: rows have none."""
    metadata_field: str = "metadata"
    """A row's object for its verifiers, such as test cases. Empty: rows have none."""
    tools_field: str = "tools"
    """Column with a row's tools: a list of JSON schemas, or JSON of one, for the chat template. Empty: none is read."""
    template_arguments_field: str = "template_arguments"
    """Column with a row's own arguments for the chat template: an object, or JSON of one. They replace those of
    `prompts.template_arguments` by name. Empty: none is read."""
    ignored_fields: str = ""
    """Comma-separated fields of messages and rows that prompts leave out on purpose, as in `tool_call_id,name,images`.
    A row with such a field that the chat template does not show is set aside unless the field is named here."""
    held_out_one_in: Count = 10
    task: str = "chain_sum"
    """A reasoning-gym task family."""
    verifier: str = "exact"
    """One of `VERIFIERS`, or `module:function` of the user's own, like those of actor/rewards. It judges the rows
    that name no rewards of their own."""
    answer_in: Literal["conclusion", "text", "number"] = "conclusion"
    """Where verifier=math looks for a response's answer. conclusion: what it says is its answer (`\\boxed{...}`,
    `<answer>...</answer>`, `#### ...`, "the answer is ..."), or all of it, if it is an expression and nothing else.
    text: there first, and without any, the last number or expression anywhere in the text. number: of a row whose
    answer is a number, the conclusion, and without any the last number in digits; what is left to be worked out is
    wrong (elsewhere 23 + 48 is 71, and where that is what was asked a policy learns to say it again). Other rows are
    judged as by conclusion."""
    truncated_responses: Truncated = "zero"
    """What a response earns that the token limit cut off. zero: 0, and no verifier is asked; only completed responses
    are judged (PipelineRL section 5). keep: what the verifier says, as any other. mask: the same, but its tokens don't
    train (DAPO section 3.4, overlong filtering): its reward counts in the group's mean and standard deviation, but it
    adds nothing to the loss, to what the loss is divided by, or to any mean over trained tokens or sequences. What an
    environment rewarded stands in all three: of an episode that a budget ended, too; see environments.truncated_reward
    for what that costs."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """auto: applied when the model's folder has one. on: required. off: prompts are plain text. Where a template is
    applied, a control token that the text of a message spells is text; in plain prompts it is the token."""
    template_name: str = ""
    """Name of the chat template, where the model's folder has several. Empty: `tool_use` for rows with tools if there
    is one, else `default`."""
    template_arguments: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    """Arguments of the chat template by name, as in {"enable_thinking": false}, for prompts and for what environments
    say. One that the template does not read is refused."""
    template_date: str = ""
    """Date that a chat template takes for today (`strftime_now`), YYYY-MM-DD. Empty: the day in UTC on which the run is
    set up; the run's config.json keeps it, so that all processes and restarts render alike."""
    system_prompt: str = ""
    add_bos: bool = False
    """True: put the tokenizer's BOS token before a plain prompt. False: only where the tokenizer itself does so, by its
    post-processor or `add_bos_token`. A prompt that begins with the token gets no second one."""
    max_bad_share: FractionOrZero = 0.1
    """Largest share of the rows of one file or data set that may be set aside as malformed, as too long, or for their
    own answer. With more a run does not start. 1: any share."""
    num_epochs: CountOrZero = 0
    """How often a row of a file may be asked at most; a run whose updates want more is refused, with the number that
    would fit. What a filter replaces or a race defers is not counted. 0: as often as it takes."""
    mixture: dict[str, PromptSource] = dataclasses.field(default_factory=dict[str, PromptSource])
    """Several sources by name, instead of the one above."""
    curriculum: Literal["none", "learnable", "stages"] = "none"
    """How the weights of a mixture follow its sources' mean rewards r. learnable: weight times 4 r (1 - r), largest
    where a source is solved half the time (sampling for learnability, Foster et al. 2025, arXiv 2502.12272, there by
    question). stages: the sources of the lowest `stage` until all of them have r >= `stage_reward`, then the next;
    those of stages passed fade out (E2H, easy to hard, arXiv 2506.06632, there by a schedule of steps)."""
    curriculum_groups: Count = 64
    """r is a running mean: over the source's groups so far, at most about so many; no stage ends before so many."""
    learnable_floor: FractionOrZero = 0.1
    """Least factor of curriculum=learnable, so that a source that is not asked any more can come back."""
    stage_reward: FractionOrZero = 0.8
    stage_review: FractionOrZero = 0.1
    """Factor on the weights of stages that are passed; 0: they don't come back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("prompts", self)
        check_parts("prompts", self.verifier, self.rewards)
        if self.rewards and self.verifier not in ("exact", *self.rewards):
            raise ValueError(
                f"prompts.verifier={self.verifier} has no effect beside prompts.rewards; put it there, or leave it out"
            )
        if self.held_out_one_in < 2:
            raise ValueError(f"prompts.held_out_one_in must be >= 2, got {self.held_out_one_in}")
        check_pattern("prompts.pattern", self.pattern, needs_group=bool(self.pattern))
        self._check_template()
        self._check_mixture()
        for name, source in self.sources.items():
            source.check(f"prompts.mixture.{name}" if name else "prompts")
        if self.answer_in != "conclusion" and not any("math" in s.parts for s in self.sources.values()):
            raise ValueError(
                f"prompts.answer_in={self.answer_in} has no effect with prompts.verifier={', '.join(self.parts)}; "
                "leave it out, or take math"
            )
        self._check_curriculum()

    def _check_template(self) -> None:
        if self.template_date and not _DATE.fullmatch(self.template_date):
            raise ValueError(f"prompts.template_date: expected YYYY-MM-DD, got {self.template_date!r}")
        try:
            self.template_settings  # noqa: B018 (a day that no month has is refused)
        except ValueError as e:
            raise ValueError(f"prompts.template_date: {e}, got {self.template_date!r}") from e
        for name in RENDERED & self.template_arguments.keys():
            raise ValueError(f"prompts.template_arguments: {name} is set by the renderer; remove it")
        given = {f: getattr(self, f) for f in ("template_arguments", "template_name") if getattr(self, f)}
        if self.chat_template == "off" and given:
            raise ValueError(f"prompts.{next(iter(given))} has no effect with prompts.chat_template=off; leave one out")

    def _check_mixture(self) -> None:
        for name in self.mixture:
            if not _SOURCE_NAME.fullmatch(name):
                raise ValueError(f"prompts.mixture: a source's name is made of letters, digits, _ and -, got {name!r}")
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in _OF_ONE_SOURCE if self.mixture else ():
            default = fields[name].default
            if getattr(self, name) != ({} if default is dataclasses.MISSING else default):
                raise ValueError(
                    f"prompts.{name} has no effect beside prompts.mixture; put it into one of its sources, as in "
                    f"prompts.mixture.{next(iter(self.mixture))}.{name}"
                )

    def _check_curriculum(self) -> None:
        if self.curriculum == "learnable" and self.learnable_floor == 0:
            raise ValueError("prompts.learnable_floor must be > 0, or a source with no reward yet would never be asked")
        if self.curriculum != "none" and len(self.mixture) < 2:
            raise ValueError(f"prompts.curriculum={self.curriculum} needs a prompts.mixture of two sources or more")
        if self.curriculum != "none" and self.num_epochs:
            raise ValueError(
                f"prompts.num_epochs can't be kept with prompts.curriculum={self.curriculum}: how often a source is "
                "asked is only known as its rewards come"
            )
        if self.curriculum == "stages" and len({s.stage for s in self.mixture.values()}) < 2:
            raise ValueError("prompts.curriculum=stages needs sources of different stages (prompts.mixture.NAME.stage)")
        if self.curriculum != "stages" and any(s.stage for s in self.mixture.values()):
            raise ValueError("prompts.mixture.NAME.stage needs prompts.curriculum=stages")

    @property
    def template_settings(self) -> TemplateSettings:
        """Settings of the chat template, the same for the learner and for actors."""
        date = {"date": datetime.date.fromisoformat(self.template_date).isoformat()} if self.template_date else {}
        return TemplateSettings(name=self.template_name, arguments=self.template_arguments, **date)

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """Names in `ignored_fields`."""
        return tuple(name for text in self.ignored_fields.split(",") if (name := text.strip()))

    @property
    def sources(self) -> dict[str, PromptSource]:
        """All sources by name, in the names' order, with what they leave out filled in; a single one's name is ""."""
        if self.mixture:
            return {name: self.filled_in(self.mixture[name]) for name in sorted(self.mixture)}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(SourceFields)}
        if self.path or self.environment:
            fields |= {"task": "", "task_args": {}}
        return {"": self.filled_in(PromptSource(**fields))}

    def filled_in(self, source: Source) -> Source:
        """A source with what it leaves out filled in."""
        judged_as_all = not source.parts and not source.environment  # an environment rewards by itself
        return dataclasses.replace(
            source,
            prompt_field=source.prompt_field or self.prompt_field,
            answer_field=source.answer_field or self.answer_field,
            answer_in=source.answer_in or self.answer_in,
            rewards=self.rewards if judged_as_all else source.rewards,
            verifier=self.verifier if judged_as_all and not self.rewards else source.verifier,
        )

    @property
    def parts(self) -> dict[str, float]:
        """By verifier, what its score counts of a row that doesn't say; of several sources of one name, the last's."""
        return {name: weight for source in self.sources.values() for name, weight in source.parts.items()}

    @property
    def custom_verifiers(self) -> tuple[str, ...]:
        """Those of the user's own; a row can't name others."""
        return tuple(name for name in self.parts if custom_functions.is_custom(name))
