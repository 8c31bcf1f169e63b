"""One look at all rows of a source: which are well-formed and of a length that fits, and which are held out."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from blake3 import blake3
from jaxtyping import Int64

from configs.sections import PromptsConfig
from learner.data.problems import BadRow, RawProblem
from learner.data.rendering import render
from learner.data.rows import RowFormat, parse_row
from learner.data.sources.rows import Row, Rows
from learner.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """A source's rows, by index from 0, after the look at them."""

    path: str
    train: Int64[np.ndarray, " N"]
    held_out: Int64[np.ndarray, " M"]
    bad: tuple[BadRow, ...]
    """Malformed, too long, or set aside by who judged their answers."""
    num_rows: int
    num_too_long: int
    num_left_out: int
    """To be neither trained on nor evaluated: in another file's evaluation set."""
    digest: str
    """Hash over question, answer, verifiers and metadata of every row that is kept, in their order."""
    num_contradicting: int
    """Questions that several rows ask with different answers."""
    prompt_tokens: tuple[int, ...]
    """Median, 90th and 99th percentile and maximum over the measured prompts; empty where none was measured."""
    max_tokens: int
    """Tokens of the longest prompt that is kept."""

    def check_num_bad(self, max_share: float) -> None:
        """Raises ValueError if more than `max_share` of the rows are set aside: why, and which field to raise."""
        num_bad = len(self.bad)
        if num_bad <= max_share * self.num_rows:
            return
        others = [row for row in self.bad if not row.is_too_long]
        reasons: list[str] = []
        if self.num_too_long:
            median, p90, p99, longest = self.prompt_tokens
            reasons.append(
                f"{self.num_too_long} prompts are empty or too long (tokens: median {median}, 90% {p90}, 99% {p99}, "
                f"longest {longest}; at most {self.max_tokens} fit: raise model.max_tokens and packing.row_tokens, or "
                "lower sampling.max_response_tokens)"
            )
        if others:
            reasons.append(f"{len(others)} for other reasons (row {others[0].row}: {others[0].reason})")
        raise ValueError(
            f"{self.path}: {num_bad} of {self.num_rows} rows would be set aside, more than prompts.max_bad_share="
            f"{max_share:g} allows: {'; '.join(reasons)}. Fix the rows, or raise --config.prompts.max_bad_share"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screen:
    """Looks at rows."""

    path: str
    """For people."""
    form: RowFormat
    tokenizer: Tokenizer
    prompts: PromptsConfig
    max_tokens: int
    """Of a prompt."""
    side: Callable[[RawProblem], str]
    """Where a row belongs: `train`, `held_out`, `neither`."""
    measured: Collection[str] = ("train", "held_out")
    """The sides whose lengths matter."""
    set_aside: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    """Reasons by row number, of rows whose own answer is wrong."""

    def look(self, rows: Rows) -> Screened:
        """Parses, renders and measures all rows.

        Raises:
          ValueError: not one is well-formed, or none that is measured fits.
        """
        found = _Found()
        for batch in rows.batches():
            self._sort(batch, found)
        if not any(found.sides.values()) and not found.num_too_long:
            first = f"; the first: row {found.bad[0].row}: {found.bad[0].reason}" if found.bad else ""
            raise ValueError(f"{self.path} has no usable row ({len(found.bad)} malformed{first})")
        for name in self.measured:
            if found.too_long[name] and not found.sides[name]:
                raise ValueError(
                    f"no prompt fits: all {found.too_long[name]} of {self.path} are empty or longer than "
                    f"{self.max_tokens} tokens (model.max_tokens - sampling.max_response_tokens)"
                )
        return Screened(
            path=self.path,
            max_tokens=self.max_tokens,
            train=np.array(found.sides["train"], np.int64),
            held_out=np.array(found.sides["held_out"], np.int64),
            bad=tuple(sorted(found.bad, key=lambda b: b.row)),
            num_rows=found.num_rows,
            num_too_long=found.num_too_long,
            num_left_out=len(found.sides["neither"]),
            digest=found.digest.hexdigest(8),
            num_contradicting=len(found.contradicting),
            prompt_tokens=_quantiles(found.sizes),
        )

    def _sort(self, batch: Sequence[Row | str | None], found: "_Found") -> None:
        kept: list[tuple[int, RawProblem, str, str]] = []
        first, found.next_row = found.next_row, found.next_row + len(batch)
        for number, row in enumerate(batch, start=first):
            if row is None:
                continue
            found.num_rows += 1
            prompt = self._prompt_of(number, row)
            if isinstance(prompt, BadRow):
                found.bad.append(prompt)
            else:
                kept.append((number, *prompt))
        for (number, raw, side, _), size in zip(kept, self._sizes(kept), strict=True):
            found.sizes += [] if size is None else [size]
            if size is None or 0 < size <= self.max_tokens:
                found.keep(number - 1, raw, side)
            else:
                found.too_long[side] += 1
                found.bad.append(BadRow.of_size(number, size, max_tokens=self.max_tokens, path=self.path))

    def _prompt_of(self, number: int, row: Row | str) -> BadRow | tuple[RawProblem, str, str]:
        """(the row's problem, the side that it belongs to, its prompt's text), or why it is set aside."""
        raw = row if isinstance(row, str) else parse_row(number, row, self.form)
        if isinstance(raw, str):
            return BadRow(number, raw, self.path)
        if number in self.set_aside:
            return BadRow(number, self.set_aside[number], self.path)
        side = self.side(raw)
        if side not in self.measured:
            return raw, side, ""
        try:
            return raw, side, render(raw, self.tokenizer, self.prompts)
        except ValueError as e:  # the chat template wants other roles, or another order of them
            return BadRow(number, str(e), self.path)

    def _sizes(self, kept: Sequence[tuple[int, RawProblem, str, str]]) -> list[int | None]:
        """Tokens of each prompt; None where its length does not matter."""
        sizes = iter(self.tokenizer.num_tokens([text for *_, side, text in kept if side in self.measured]))
        return [next(sizes) if side in self.measured else None for *_, side, _ in kept]


def _quantiles(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(q) for q in np.quantile(sizes, (0.5, 0.9, 0.99, 1), method="higher")) if sizes else ()


class _Found:
    """What was seen so far."""

    def __init__(self) -> None:
        self.sides: dict[str, list[int]] = {"train": [], "held_out": [], "neither": []}
        self.too_long = {"train": 0, "held_out": 0}
        self.bad: list[BadRow] = []
        self.sizes: list[int] = []
        self.digest = blake3()
        self.contradicting: set[int] = set()
        self._answers: dict[int, int] = {}
        self.num_rows = 0
        self.next_row = 1

    def keep(self, index: int, raw: RawProblem, side: str) -> None:
        """Takes a row in as one of its side."""
        self.sides[side].append(index)
        self.digest.update(
            repr(
                (side, raw.question, raw.messages, raw.task, raw.environment, raw.tools, raw.template_arguments)
            ).encode()
        )
        question, answer = hash(raw.question.strip()), hash(raw.task.answer)
        if self._answers.setdefault(question, answer) != answer:
            self.contradicting.add(question)

    @property
    def num_too_long(self) -> int:
        return sum(self.too_long.values())
