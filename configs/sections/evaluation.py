"""Config section of evaluation: named problem sets that the engines sample with the current policy."""

import dataclasses
import re
from typing import Literal

from configs.sections.base import (
    CheckedSection,
    Count,
    CountOrZero,
    Finite,
    Fraction,
    NotNegative,
    check_ranges,
    check_unread,
    temperature,
)
from configs.sections.prompts import PromptSource

HELD_OUT = "heldout"
"""Name of the evaluation set of held-out training problems. It exists if evaluation.num_problems > 0."""
MAX_SETS = 64

_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKEN = ("rewards",)
"""Reserved set names. A set named "rewards" would collide with eval/rewards/* metrics of the held-out set."""
_OF_TRAINING = ("eval_path", "eval_split", "weight", "stage", "teacher")
"""Fields of a source that apply to training only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet(PromptSource):
    """Evaluation set: a problem source and its sampling parameters. Unset fields default to `evaluation`.

    A set without path, task or environment uses the held-out problems of `prompts`. Training excludes all questions of
    evaluation sets.
    """

    num_problems: CountOrZero = 0
    """Number of problems, taken from the start of the set. 0: all rows of a file, or `evaluation.num_problems` of a
    task or environment."""
    k: CountOrZero = 0
    """Samples per problem. 0: evaluation.k."""
    temperature: NotNegative | None = None
    """Sampling temperature. 0: greedy. None: evaluation.temperature."""
    top_p: Fraction | None = None
    """Nucleus sampling mass. 1: no truncation. None: evaluation.top_p."""
    max_tokens: CountOrZero = 0
    """Largest number of tokens per response. 0: sampling.max_response_tokens."""
    every_n_steps: CountOrZero | None = None
    """Updates between two evaluations of this set. 0: only at the start and end of the run. None:
    evaluation.every_n_steps."""
    pass_reward: Finite | None = None
    """Reward at which a response passes. None: evaluation.pass_reward."""

    @property
    def has_source(self) -> bool:
        """True if the set has its own path, task or environment."""
        return bool(self.path or self.task or self.environment)

    def check_set(self, name: str) -> None:
        """Raises ValueError if the name, the sampling parameters or the fields of the set are invalid.

        `PromptSource.check` validates the source after `prompts` has filled in its defaults.
        """
        where = f"evaluation.sets.{name}"
        if not _SET_NAME.fullmatch(name) or name in _TAKEN:
            raise ValueError(
                f"evaluation.sets: expected a name of letters, digits, _ and - (not {', '.join(_TAKEN)}), got {name!r}"
            )
        check_ranges(where, self)
        if self.temperature:
            temperature(where, self.temperature)
        check_unread(where, self, "because evaluation sets are not trained; leave it out", _OF_TRAINING)
        if name == HELD_OUT and self.has_source:
            raise ValueError(
                f"{where} must use the held-out problems of prompts. Give a set with its own source another name"
            )
        if not self.has_source:
            why = f"without {where}.path, task or environment: the set uses the held-out problems of prompts"
            check_unread(where, self, why, {field.name for field in dataclasses.fields(PromptSource)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(CheckedSection):
    """Evaluation during training, with the engines that serve the policy."""

    num_problems: CountOrZero = 256
    """Number of held-out problems to evaluate. 0: none, which requires publish.probe_every_n_publishes=0, because
    probes use held-out problems."""
    every_n_steps: CountOrZero = 50
    """Updates between two evaluations. Every set is also evaluated at the start and end of the run. 0: only at the
    start and end."""
    temperature: NotNegative = 1.0
    """Sampling temperature of evaluations. 0: greedy."""
    top_p: Fraction = 1.0
    """Nucleus sampling mass of evaluations. 1: no truncation."""
    k: Count = 1
    """Samples per problem."""
    pass_reward: Finite = 1.0
    """Smallest reward at which a response passes. Used by pass@k and maj@k."""
    sets: dict[str, EvaluationSet] = dataclasses.field(default_factory=dict[str, EvaluationSet])
    """Additional evaluation sets by name. The entry `heldout` overrides sampling parameters of the held-out set."""
    at_publish: Literal["go_on", "wait"] = "go_on"
    """Policy when weights are due to be published during an evaluation. `go_on`: publish; the evaluation finishes on
    newer weights (reported in eval/version and eval/last_version). `wait`: publish after the evaluation, so that it
    uses one version."""
    max_engine_fraction: Fraction = 1.0
    """Largest fraction of all live engine capacity for evaluations during training. 1: request all problems
    immediately, ahead of training. After training, evaluations use the full capacity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 0:
            temperature("evaluation", self.temperature)
        if len(self.sets) > MAX_SETS:
            raise ValueError(f"evaluation.sets: expected at most {MAX_SETS} sets, got {len(self.sets)}")
        for name, one in self.sets.items():
            one.check_set(name)
            if not one.has_source and not self.num_problems:
                raise ValueError(
                    f"evaluation.sets.{name} uses held-out problems, which require evaluation.num_problems > 0, got 0"
                )
        for name, one in self.resolved.items():
            if not one.path and not one.num_problems:
                raise ValueError(f"evaluation.sets.{name}.num_problems must be > 0, because its problems are generated")
            if one.temperature == 0 and one.k > 1:
                raise ValueError(
                    f"evaluation.sets.{name}: expected k=1 for greedy sampling, got k={one.k}. Set k=1 or a "
                    "temperature > 0"
                )

    @property
    def resolved(self) -> dict[str, EvaluationSet]:
        """All sets in evaluation order, the held-out set first, with defaults filled in."""
        held_out = {HELD_OUT: self.sets.get(HELD_OUT, EvaluationSet())} if self.num_problems else {}
        named = {name: self.sets[name] for name in sorted(self.sets) if name != HELD_OUT}
        return {name: self._filled_in(one) for name, one in (held_out | named).items()}

    def _filled_in(self, one: EvaluationSet) -> EvaluationSet:
        num_problems = one.num_problems or (0 if one.path else self.num_problems)
        return dataclasses.replace(
            one,
            num_problems=num_problems if one.has_source else min(num_problems, self.num_problems),
            k=one.k or self.k,
            temperature=self.temperature if one.temperature is None else one.temperature,
            top_p=self.top_p if one.top_p is None else one.top_p,
            every_n_steps=self.every_n_steps if one.every_n_steps is None else one.every_n_steps,
            pass_reward=self.pass_reward if one.pass_reward is None else one.pass_reward,
        )
