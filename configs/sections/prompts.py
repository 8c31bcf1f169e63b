"""Problems and their verifier."""

import dataclasses
import math
import re
from typing import Literal

from configs import extension

VERIFIERS = ("reasoning_gym", "exact", "math", "format")

Truncated = Literal["zero", "keep", "mask"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where problems come from and how answers are judged."""

    path: str = ""
    """A .jsonl or .parquet file; empty means the reasoning-gym task below."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    eval_path: str = ""
    """Held-out problems; empty: one in `held_out_one_in` of the problems, chosen by a hash of the prompt."""
    held_out_one_in: int = 10
    task: str = "chain_sum"
    """A reasoning-gym task family."""
    task_args: dict[str, int | float | str | bool] = dataclasses.field(
        default_factory=dict[str, int | float | str | bool]
    )
    pattern: str = ""
    """A regular expression whose first group is the part of the question to show; empty shows it all."""
    verifier: str = "exact"
    """One of `VERIFIERS`, or `module:function` of the user's own, like those of actor/verifiers; for rows that name no
    rewards of their own."""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Instead of one verifier several, by name, and what each one's score counts: the reward is their weighted sum. A
    row of a file may have its own (a field "rewards": [{"name": ..., "weight": ...}])."""
    answer_in: Literal["conclusion", "text"] = "conclusion"
    """Where verifier=math looks for a response's answer. conclusion: what it says is its answer (`\\boxed{...}`,
    `#### ...`, "the answer is ..."), or all of it, if it is an expression and nothing else. text: there first, and
    without any, the last number or expression anywhere in the text."""
    truncated: Truncated = "zero"
    """What a response earns that the token limit cut off. zero: 0, and no verifier is asked; only completed responses
    are judged (PipelineRL section 5). keep: what the verifier says, as any other. mask: the same, but its tokens don't
    train (DAPO section 3.4, overlong filtering): its reward counts in the group's mean and standard deviation, but it
    adds nothing to the loss, to what the loss is divided by, or to any mean over trained tokens or sequences."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """auto: applied when the tokenizer has one."""
    system_prompt: str = ""
    add_bos: bool = False
    """Put the tokenizer's BOS token before a prompt that no chat template was applied to."""

    def __post_init__(self) -> None:
        extension.check_name("prompts.verifier", self.verifier, VERIFIERS)
        for name, weight in self.rewards.items():
            extension.check_name("prompts.rewards", name, VERIFIERS)
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"prompts.rewards.{name} must be a finite weight and not 0, got {weight}")
        if self.rewards and self.verifier not in ("exact", *self.rewards):
            raise ValueError(
                f"prompts.verifier={self.verifier} has no effect beside prompts.rewards; put it there, or leave it out"
            )
        if self.held_out_one_in < 2:
            raise ValueError(f"prompts.held_out_one_in must be >= 2, got {self.held_out_one_in}")
        if self.path and "reasoning_gym" in self.parts:
            raise ValueError(
                "prompts.verifier=reasoning_gym needs a reasoning-gym task; for prompts.path use exact or math"
            )
        if self.answer_in != "conclusion" and "math" not in self.parts:
            raise ValueError(
                f"prompts.answer_in={self.answer_in} has no effect with prompts.verifier={', '.join(self.parts)}; "
                "leave it out, or take math"
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as e:
            raise ValueError(f"prompts.pattern is no regular expression: {e}") from e
        if self.pattern and groups < 1:
            raise ValueError(f"prompts.pattern needs a group in parentheses, got {self.pattern!r}")

    @property
    def parts(self) -> dict[str, float]:
        """By verifier, what its score counts of a row that doesn't say."""
        return self.rewards or {self.verifier: 1.0}

    @property
    def own_verifiers(self) -> tuple[str, ...]:
        """Those of the user's own."""
        return tuple(name for name in self.parts if extension.is_own(name))
