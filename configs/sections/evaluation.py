"""Evaluation: named sets of problems, sampled by the engine that serves the policy."""

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
    temperature,
)
from configs.sections.prompts import PromptSource

HELD_OUT = "heldout"
"""Name of the set of the held-out problems, which is there whenever there are any."""
MAX_SETS = 64

_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKEN = ("rewards",)
"""Would read like a metric of the held-out set: eval/rewards/math."""
_OF_TRAINING = ("eval_path", "eval_split", "weight", "stage")
"""Fields of a source that say how it is trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet(PromptSource):
    """Problems of a source of their own, and how they are asked; what is empty or None is as `evaluation` has it.

    Without a path, a task or an environment it asks the held-out problems of `prompts`. No source trains on a question
    that a set has.
    """

    num_problems: CountOrZero = 0
    """The first so many; 0: all rows of a file, and `evaluation.num_problems` of what is made by index."""
    k: CountOrZero = 0
    """Samples a problem."""
    temperature: NotNegative | None = None
    """0 is greedy."""
    top_p: Fraction | None = None
    max_tokens: CountOrZero = 0
    """Of a response; 0: sampling.max_response_tokens."""
    every_n_steps: CountOrZero | None = None
    pass_reward: Finite | None = None

    @property
    def has_source(self) -> bool:
        """Whether its problems are its own."""
        return bool(self.path or self.task or self.environment)

    def check_set(self, name: str) -> None:
        """Refuses what can't be asked; its source is checked once `prompts` has filled it in.

        Raises:
          ValueError: names the field.
        """
        where = f"evaluation.sets.{name}"
        if not _SET_NAME.fullmatch(name) or name in _TAKEN:
            raise ValueError(
                f"evaluation.sets: a set's name is made of letters, digits, _ and - and not {', '.join(_TAKEN)}, got "
                f"{name!r}"
            )
        check_ranges(where, self)
        if self.temperature:
            temperature(where, self.temperature)
        defaults = PromptSource()
        for field in _OF_TRAINING:
            if getattr(self, field) != getattr(defaults, field):
                raise ValueError(f"{where}.{field} has no effect: nothing trains on an evaluation set; leave it out")
        if name == HELD_OUT and self.has_source:
            raise ValueError(f"{where} is of the held-out problems of prompts; give a set of its own another name")
        if not self.has_source:
            self._check_is_of_prompts(where)

    def _check_is_of_prompts(self, where: str) -> None:
        asks = {f.name for f in dataclasses.fields(EvaluationSet)} - {f.name for f in dataclasses.fields(PromptSource)}
        default = EvaluationSet()
        for field in dataclasses.fields(self):
            if field.name not in asks and getattr(self, field.name) != getattr(default, field.name):
                raise ValueError(
                    f"{where}.{field.name} has no effect without {where}.path, task or environment: the set asks the "
                    "held-out problems of prompts"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(CheckedSection):
    """What is evaluated while a run trains, through the engines that serve the policy."""

    num_problems: CountOrZero = 256
    """Held-out problems. 0: none; the publish section's probes, which take held-out problems, must be off too."""
    every_n_steps: CountOrZero = 50
    """Updates between two evaluations. Also at the start and at the end; 0 only there."""
    temperature: NotNegative = 1.0
    """0 is greedy."""
    top_p: Fraction = 1.0
    k: Count = 1
    """Samples a problem."""
    pass_reward: Finite = 1.0
    """A response whose reward is at least this passes: what pass@k and maj@k count."""
    sets: dict[str, EvaluationSet] = dataclasses.field(default_factory=dict[str, EvaluationSet])
    """Further sets by name; `heldout` says how the held-out problems are asked, where that differs."""
    at_publish: Literal["go_on", "wait"] = "go_on"
    """What is done where weights are due to be published and an evaluation is not back: it goes on and ends on newer
    weights, and says which (eval/version, eval/last_version); or the publish waits, and an evaluation is of one
    version."""
    max_engine_fraction: Fraction = 1.0
    """Part of the places of all live engines that evaluations may take beside training; 1: all are asked for at once,
    before training. When training is over they have all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 0:
            temperature("evaluation", self.temperature)
        if len(self.sets) > MAX_SETS:
            raise ValueError(f"evaluation.sets has {len(self.sets)} sets, at most {MAX_SETS} are possible")
        for name, one in self.sets.items():
            one.check_set(name)
            if not one.has_source and not self.num_problems:
                raise ValueError(
                    f"evaluation.sets.{name} is of the held-out problems, and evaluation.num_problems=0 holds out none"
                )
        for name, one in self.resolved.items():
            if not one.path and not one.num_problems:
                raise ValueError(f"evaluation.sets.{name}.num_problems must be > 0: its problems are made by index")
            if one.temperature == 0 and one.k > 1:
                raise ValueError(
                    f"evaluation.sets.{name}: {one.k} greedy samples of a problem are all alike; set its k=1, or a "
                    "temperature"
                )

    @property
    def resolved(self) -> dict[str, EvaluationSet]:
        """All sets in the order in which they are asked, the held-out one first, with what they leave out filled in."""
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
