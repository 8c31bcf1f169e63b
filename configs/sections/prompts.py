"""Config section of prompts: problem sources, verifiers, curriculum and mixture."""

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
    check_unread,
    expand_home,
)

VERIFIERS = ("reasoning_gym", "exact", "math", "format", "code", "judge")


READS_ANSWERS = ("reasoning_gym", "exact", "math")
"""Verifiers that extract the answer of a response. maj@k votes by these answers."""


HUGGING_FACE = "hf:"
"""Prefix of a Hugging Face Hub dataset name, or of a local folder in its format."""


PlainArgs = dict[str, int | Finite | str | bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFields:
    """Fields of a problem source, shared by `prompts`, mixture sources and evaluation sets."""

    path: LocalPath = ""
    """Problem file (.jsonl, .parquet or .arrayrecord; `*` matches several .arrayrecord files), or `hf:` and a Hugging
    Face Hub dataset name or a folder in its format. Empty: problems of the task or the environment."""
    subset: str = ""
    """Subset of a Hugging Face dataset, for example "main" of openai/gsm8k. Empty: its default subset."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face dataset. Empty: the newest commit."""
    eval_path: LocalPath = ""
    """Path of held-out problems. A Hugging Face dataset other than `path` is read in its default subset and newest
    commit, and its split eval_split (empty: train). Empty: one in `prompts.held_out_one_in` problems is held out,
    chosen by a hash of the prompt."""
    eval_split: str = ""
    """Split with held-out problems of the Hugging Face dataset `eval_path`, or else `path`. Empty: eval_path, or else
    one in `prompts.held_out_one_in` problems."""
    task: str = ""
    """reasoning-gym task family. Empty: no task."""
    task_args: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    """Arguments of the reasoning-gym task. Empty: its defaults."""
    environment: str = ""
    """Environment in which each problem is one episode. Empty: single-turn responses. It generates its own problems
    unless a path is set, and provides the reward. `rewards` adds verifier scores; in a mixture, so does a source's
    verifier."""
    environment_args: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    """Arguments of the environment's problem generator. Empty: its defaults."""
    environment_rows: str = ""
    """`module:function` of a custom problem generator for the environment. Empty: the generator in configs/tasks."""
    pattern: str = ""
    """Regular expression whose first group is the part of a task's question to show. Empty: the whole question."""
    rewards: dict[str, Finite] = dataclasses.field(default_factory=dict[str, float])
    """Weights of several verifiers by name; the reward is the weighted sum of their scores. A file row can override
    them (`prompts.rewards_field`). Empty: one verifier with weight 1."""

    def __post_init__(self) -> None:
        expand_home(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSource(SourceFields):
    """Problem source of a mixture. Fields that say so default to `prompts`; `rewards` does if `verifier` is empty too.

    Problems are the rows of `path`, else those of `task`, else those that `environment` generates.
    """

    prompt_field: str = ""
    """Column with the prompt. Empty: prompts.prompt_field."""
    answer_field: str = ""
    """Column with the reference answer. Empty: prompts.answer_field."""
    verifier: str = ""
    """Verifier of rows without their own rewards. Empty: prompts.verifier, or none for an environment."""
    answer_in: Literal["", "conclusion", "text", "number"] = ""
    """Location of the answer in a response, for verifier=math: `conclusion`, `text` or `number` (see
    prompts.answer_in). Empty: prompts.answer_in."""
    weight: Weight = 1.0
    """Sampling weight of the source, relative to the weights of the other sources."""
    stage: CountOrZero = 0
    """Stage of the source for prompts.curriculum=stages. Lower stages are trained first."""
    teacher: str = ""
    """Teacher of the source's rows that name none, one of loss.teachers. Empty: teacher of loss.teacher_path or
    loss.teacher_url."""

    @property
    def parts(self) -> dict[str, float]:
        """Verifier weights of rows without their own rewards, by verifier; empty if only the environment rewards."""
        return self.rewards or ({self.verifier: 1.0} if self.verifier else {})

    @property
    def is_hugging_face(self) -> bool:
        """True if the Hugging Face library reads `path`."""
        return self.path.startswith(HUGGING_FACE)

    def check(self, where: str) -> None:
        """Raises ValueError if the fields, at path `where`, do not describe exactly one source."""
        if self.path and self.task:
            raise ValueError(f"{where}.path and {where}.task are two sources. Set one, or a mixture of both")
        if not (self.path or self.task or self.environment):
            raise ValueError(f"{where}: set path, task or environment")
        check_ranges(where, self)
        check_parts(where, self.verifier, self.rewards)
        self._check_judges(where)
        self._check_fields_have_effect(where)
        check_pattern(f"{where}.pattern", self.pattern, needs_group=bool(self.pattern))

    def _check_judges(self, where: str) -> None:
        if not self.parts and not self.environment:
            raise ValueError(f"{where}: set verifier or rewards")
        if self.rewards and self.verifier and self.verifier not in self.rewards:
            raise ValueError(
                f"{where}.verifier={self.verifier} has no effect with {where}.rewards; add it to {where}.rewards, or "
                "leave it out"
            )
        if "reasoning_gym" in self.parts and not self.task:
            raise ValueError(
                f"{where}.verifier=reasoning_gym requires a reasoning-gym task; for {where}.path use exact or math"
            )

        if "code" in self.parts and self.task:
            raise ValueError(
                f"{where}.verifier=code requires rows with test cases ({where}.path), got {where}.task={self.task}"
            )

    def _check_fields_have_effect(self, where: str) -> None:
        is_eval_of_hub = self.eval_path.startswith(HUGGING_FACE)
        of_hub = (self.subset, self.revision, "" if is_eval_of_hub else self.eval_split)
        if not self.is_hugging_face and (self.split != "train" or any(of_hub)):
            raise ValueError(
                f"{where}.subset, split, revision and eval_split require a Hugging Face dataset (path=hf:NAME), got "
                f"{where}.path={self.path!r}"
            )
        if self.eval_path and self.eval_split and not is_eval_of_hub:
            raise ValueError(f"{where}.eval_path and {where}.eval_split both select held-out problems. Set only one")
        if self.eval_path and not self.path:
            raise ValueError(f"{where}.eval_path requires {where}.path, because a task generates its held-out problems")
        makes_rows = self.environment and not (self.path or self.task)
        if (self.environment_args or self.environment_rows) and not makes_rows:
            raise ValueError(
                f"{where}.environment_args and {where}.environment_rows require an environment that generates its own "
                f"rows ({where}.environment without a path or a task)"
            )
        if where != "prompts" and not self.task and (self.task_args or self.pattern):
            raise ValueError(f"{where}.task_args and {where}.pattern require {where}.task")
        if self.environment_rows:
            custom_functions.check_name(f"{where}.environment_rows", self.environment_rows, ())


def check_parts(where: str, verifier: str, rewards: dict[str, float]) -> None:
    """Raises ValueError for an unknown verifier or a weight of 0."""
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
"""Fields that belong to each source in a mixture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig(SourceFields):
    """Problem sources, chat template and verifiers."""

    prompt_field: str = "prompt"
    """Column with the prompt: a text or a list of messages."""
    answer_field: str = "answer"
    """Column with the reference answer."""
    rewards_field: str = "rewards"
    """Column with a row's own verifiers: a list of {name, weight}. Empty: not read."""
    metadata_field: str = "metadata"
    """Column with a row's object for verifiers, such as test cases. Empty: not read."""
    tools_field: str = "tools"
    """Column with a row's tools for the chat template: a list of JSON schemas, or a JSON text of one. Empty: not
    read."""
    template_arguments_field: str = "template_arguments"
    """Column with a row's own chat template arguments: an object, or a JSON text of one. They override
    `prompts.template_arguments` by name. Empty: not read."""
    teacher_field: str = ""
    """Column with the name of a row's teacher, one of loss.teachers. Empty: not read."""
    ignored_fields: str = ""
    """Comma-separated fields of messages and rows that the chat template may omit, for example
    `tool_call_id,name,images`. Rows with any other omitted field are quarantined. Empty: no field may be omitted."""
    held_out_one_in: Count = 10
    """Inverse share of held-out problems: 10 holds out one in 10. Ignored for sources with eval_path or eval_split."""
    task: str = "chain_sum"
    """reasoning-gym task family. Ignored if path or environment is set."""
    verifier: str = "exact"
    """Verifier of rows without their own rewards, one of `VERIFIERS`, or `module:function` for a custom one. Not used
    with prompts.environment, which provides the reward."""
    answer_in: Literal["conclusion", "text", "number"] = "conclusion"
    """Location of the answer in a response, for verifier=math. `conclusion`: stated final answer (`\\boxed{...}`,
    `<answer>...</answer>`, `#### ...`, "the answer is ..."), or the whole response if it is a single expression.
    `text`: the stated final answer, else the last number or expression in the text. `number`: the stated final answer,
    else the last number in digits, for rows with a number as the answer.

    `number` rejects unevaluated expressions, because a policy can otherwise learn to repeat the question (23 + 48 for
    71). Rows with other answers are scored as with `conclusion`."""
    truncated_responses: Truncated = "zero"
    """Reward of responses that reach the token limit. `zero`: 0 without calling a verifier (PipelineRL section 5).
    `keep`: score of the verifier, as for complete responses. `mask`: score of the verifier for the mean and standard
    deviation of the group, but no contribution to the loss, its denominator or token and sequence means (DAPO section
    3.4).

    Rewards of environments are always kept; environments.truncated_reward penalizes truncated episodes."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Use of the model's chat template. `auto`: apply it if the model folder has one. `on`: require it. `off`: use
    plain text prompts. A template turns control tokens in messages into plain text; plain prompts keep them as
    tokens."""
    template_name: str = ""
    """Name of the chat template, for models with several. Empty: `tool_use` for rows with tools if it exists, else
    `default`."""
    template_arguments: PlainArgs = dataclasses.field(default_factory=PlainArgs)
    """Chat template arguments by name, for example {"enable_thinking": false}, for prompts and environment messages.
    Arguments that the template does not read are rejected."""
    template_date: str = ""
    """Current date for the chat template (`strftime_now`), as YYYY-MM-DD. Empty: UTC date of the run's setup, stored in
    the run's config.json so that all processes and restarts render identical prompts."""
    system_prompt: str = ""
    """System message of chat prompts that have none, and prefix of plain prompts. Empty: none."""
    add_bos: bool = False
    """True if the tokenizer's BOS token precedes each plain prompt that does not already begin with it. False: the
    tokenizer decides, with its post-processor or `add_bos_token`."""
    max_bad_share: FractionOrZero = 0.1
    """Largest share of quarantined rows per file or dataset. Rows are quarantined if they are malformed, too long or
    fail their own verifier. The run does not start above this share. 1: any share."""
    num_epochs: CountOrZero = 0
    """Largest number of times a file row is sampled. A run whose updates need more raises an error that states the
    possible number. Prompts that replace filtered groups or are deferred to a later round are not counted.
    0: unlimited."""
    mixture: dict[str, PromptSource] = dataclasses.field(default_factory=dict[str, PromptSource])
    """Problem sources by name, in place of a single source. Empty: one source."""
    curriculum: Literal["none", "learnable", "stages"] = "none"
    """Adaptation of mixture weights to the mean reward r of each source. `none`: fixed weights. `learnable`: weight
    times 4 r (1 - r), largest at r = 0.5 (sampling for learnability, Foster et al. 2025, arXiv 2502.12272, which uses
    it per question). `stages`: sources of the lowest `stage` until all have r >= `stage_reward`, then the next stage;
    passed stages fade out (E2H, arXiv 2506.06632, which uses a step schedule)."""
    curriculum_groups: Count = 64
    """Averaging window of r, in groups of the source. It is also the smallest number of groups per stage."""
    learnable_floor: FractionOrZero = 0.1
    """Smallest factor of curriculum=learnable. A value above 0 lets solved and unsolved sources return."""
    stage_reward: FractionOrZero = 0.8
    """Mean reward r that completes a stage of curriculum=stages."""
    stage_review: FractionOrZero = 0.1
    """Weight factor of completed stages. 0: completed stages are not sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("prompts", self)
        check_parts("prompts", self.verifier, self.rewards)
        if self.rewards and self.verifier not in ("exact", *self.rewards):
            raise ValueError(
                f"prompts.verifier={self.verifier} has no effect with prompts.rewards; add it to prompts.rewards, or "
                "leave it out"
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
                "leave it out, or set prompts.verifier=math"
            )
        self._check_curriculum()

    def _check_template(self) -> None:
        if self.template_date and not _DATE.fullmatch(self.template_date):
            raise ValueError(f"prompts.template_date: expected YYYY-MM-DD, got {self.template_date!r}")
        try:
            self.template_settings  # noqa: B018 (a day that no month has is refused)
        except ValueError as e:
            raise ValueError(f"prompts.template_date: expected a date ({e}), got {self.template_date!r}") from e
        for name in RENDERED & self.template_arguments.keys():
            raise ValueError(f"prompts.template_arguments: {name} is set by the renderer; remove it")
        given = {f: getattr(self, f) for f in ("template_arguments", "template_name") if getattr(self, f)}
        if self.chat_template == "off" and given:
            raise ValueError(f"prompts.{next(iter(given))} has no effect with prompts.chat_template=off; leave one out")

    def _check_mixture(self) -> None:
        for name in self.mixture:
            if not _SOURCE_NAME.fullmatch(name):
                raise ValueError(f"prompts.mixture: expected a source name of letters, digits, _ and -, got {name!r}")
        if self.mixture:
            why = f"with prompts.mixture; set it in a source, for example in prompts.mixture.{next(iter(self.mixture))}"
            check_unread("prompts", self, why, _OF_ONE_SOURCE)

    def _check_curriculum(self) -> None:
        if self.curriculum == "learnable" and self.learnable_floor == 0:
            raise ValueError("prompts.learnable_floor must be > 0, or a source without rewards is never sampled")
        if self.curriculum != "none" and len(self.mixture) < 2:
            raise ValueError(f"prompts.curriculum={self.curriculum} requires a prompts.mixture of at least two sources")
        if self.curriculum != "none" and self.num_epochs:
            raise ValueError(
                f"prompts.num_epochs must be 0 with prompts.curriculum={self.curriculum}, got {self.num_epochs}: "
                "rewards decide how often a source is sampled"
            )
        if self.curriculum == "stages" and len({s.stage for s in self.mixture.values()}) < 2:
            raise ValueError(
                "prompts.curriculum=stages requires sources of different stages (prompts.mixture.NAME.stage)"
            )
        if self.curriculum != "stages" and any(s.stage for s in self.mixture.values()):
            raise ValueError("prompts.mixture.NAME.stage requires prompts.curriculum=stages")

    @property
    def template_settings(self) -> TemplateSettings:
        """Chat template settings of the learner and all actors."""
        date = {"date": datetime.date.fromisoformat(self.template_date).isoformat()} if self.template_date else {}
        return TemplateSettings(name=self.template_name, arguments=self.template_arguments, **date)

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """Field names in `ignored_fields`."""
        return tuple(name for text in self.ignored_fields.split(",") if (name := text.strip()))

    @property
    def sources(self) -> dict[str, PromptSource]:
        """All sources by name, sorted, with defaults filled in. A single source has the name ""."""
        if self.mixture:
            return {name: self.filled_in(self.mixture[name]) for name in sorted(self.mixture)}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(SourceFields)}
        if self.path or self.environment:
            fields |= {"task": "", "task_args": {}}
        return {"": self.filled_in(PromptSource(**fields))}

    def filled_in(self, source: Source) -> Source:
        """Returns the source with defaults filled in."""
        judged_as_all = not source.parts and not source.environment  # an environment provides the reward
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
        """Verifier weights of rows without their own rewards, by verifier. The last source wins for equal names."""
        return {name: weight for source in self.sources.values() for name, weight in source.parts.items()}
