"""What the sources of a run's prompts have in common, and what each becomes."""

import dataclasses
from typing import Protocol

from configs.schema import Config
from configs.sections.prompts import PromptSource
from learner.data.parse_row import RowFormat
from learner.data.problem import BadRow, Problem, RawProblem, is_held_out
from learner.data.row_filter import FilterResult
from learner.data.tokenizer import Tokenizer, max_prompt_tokens, tokenize


class Problems(Protocol):
    """What a source trains on, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem | BadRow | None:
        """Problem `index`; None if that one is held out, or why it is set aside."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedSource:
    """A source, looked at."""

    name: str
    source: PromptSource
    problems: Problems
    is_endless: bool
    """Made by index, so that no epoch ends."""
    held_out: tuple[Problem, ...]
    """As many as were asked for, or all."""
    bad: tuple[BadRow, ...] = ()
    looked_at: tuple[FilterResult, ...] = ()
    """Counts of the look at all rows: the file to train on, then an evaluation file; none for rows by index."""


@dataclasses.dataclass(frozen=True)
class SourceContext:
    """Config and tokenizer, and the evaluation that all sources keep out of training."""

    config: Config
    tokenizer: Tokenizer
    evaluated: frozenset[str] = frozenset()
    """Questions, stripped, of evaluation files and sets, and of other sources' held-out problems."""
    response_tokens: int = 0
    """Of the longest response; 0: sampling.max_response_tokens."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt: what the response leaves for it."""
        return max_prompt_tokens(self.config, response_tokens=self.response_tokens)

    def form(self, source: PromptSource) -> RowFormat:
        """How a source's rows are read."""
        return RowFormat.of(self.config.prompts, source)

    def is_held_out(self, raw: RawProblem) -> bool:
        """Whether its hash holds it out."""
        return is_held_out(raw.question, self.config.prompts.held_out_one_in)

    def is_evaluated(self, raw: RawProblem) -> bool:
        """Whether an evaluation has it, whatever its hash."""
        return raw.question.strip() in self.evaluated

    def tokenize(self, raw: RawProblem, name: str) -> Problem:
        """The problem of source `name`.

        Raises:
          ValueError: the chat template refuses it.
        """
        return tokenize(raw, self.tokenizer, self.config.prompts, source=name)


def where(name: str) -> str:
    """The field of the config that describes a source."""
    return f"prompts.mixture.{name}" if name else "prompts"
