"""Validation pass over a source's rows, quarantine file, and reference-answer failures.

Imports neither grain nor jax, because `launch.startup.preflight` checks prompts before anything starts.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from blake3 import blake3
from jaxtyping import Int64

from bridge.files import json_lines, replace_file
from bridge.rollout_types import Task
from configs.sections import PromptsConfig
from learner.data.completions import joined, render_completions
from learner.data.parse_row import RowFormat, parse_row
from learner.data.problem import BadRow, RawProblem
from learner.data.readers import Row, Rows, open_rows
from learner.data.tokenizer import Tokenizer, render


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterResult:
    """Result of the scan of a source; rows by index from 0."""

    path: str
    train: Int64[np.ndarray, " N"]
    held_out: Int64[np.ndarray, " M"]
    bad: tuple[BadRow, ...]
    """Rows that are malformed, too long, or whose reference answer failed."""
    num_rows: int
    num_too_long: int
    num_left_out: int
    """Rows excluded from training because an evaluation has their question."""
    digest: str
    """Hash of question, answer, verifiers and metadata of all kept rows, in order."""
    num_contradicting: int
    """Questions that several rows ask with different answers."""
    prompt_tokens: tuple[int, ...]
    """Median, 90th and 99th percentile and maximum tokens of the measured prompts; empty if none was measured."""
    max_tokens: int
    """Maximum tokens of a prompt."""
    response_limit: str
    """Config field that limits a response's tokens; empty for supervised rows, whose responses count as prompt."""

    def check_num_bad(self, max_share: float) -> None:
        """Raises ValueError, with reasons and the field to raise, if more than `max_share` of the rows are bad."""
        num_bad = len(self.bad)
        if num_bad <= max_share * self.num_rows:
            return
        others = [row for row in self.bad if not row.is_too_long]
        reasons: list[str] = []
        if self.num_too_long:
            median, p90, p99, longest = self.prompt_tokens
            lower = f", or lower {self.response_limit}" if self.response_limit else ""
            reasons.append(
                f"{self.num_too_long} prompts are empty or too long (tokens: median {median}, 90% {p90}, 99% {p99}, "
                f"longest {longest}; at most {self.max_tokens} fit: raise model.max_tokens and packing.row_tokens"
                f"{lower})"
            )
        if others:
            reasons.append(f"{len(others)} for other reasons (row {others[0].row}: {others[0].reason})")
        raise ValueError(
            f"{self.path}: {num_bad} of {self.num_rows} rows would be quarantined, more than prompts.max_bad_share="
            f"{max_share:g} allows: {'; '.join(reasons)}. Fix the rows, or raise --config.prompts.max_bad_share"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFilter:
    """Scanner that sorts rows into training, held-out and bad."""

    path: str
    """Human-readable name of the rows' source."""
    form: RowFormat
    tokenizer: Tokenizer
    prompts: PromptsConfig
    max_tokens: int
    """Maximum tokens of a prompt."""
    response_limit: str
    """Config field that limits a response's tokens; empty for supervised rows."""
    side: Callable[[RawProblem], str]
    """Returns the use of a row: `train`, `held_out` or `neither`."""
    measured: Collection[str] = ("train", "held_out")
    """Sides whose prompts are rendered and measured."""
    gold_failures: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    """Reasons by row number for rows whose reference answer is wrong."""

    def scan(self, rows: Rows) -> FilterResult:
        """Parses, renders and measures all rows; raises ValueError if none is valid or no measured prompt fits."""
        found = _FilterCounts()
        for batch in rows.batches():
            self._sort(batch, found)
        if not any(found.sides.values()) and not found.num_too_long:
            first = f"; the first: row {found.bad[0].row}: {found.bad[0].reason}" if found.bad else ""
            raise ValueError(f"{self.path} has no usable row ({len(found.bad)} malformed{first})")
        for name in self.measured:
            if found.too_long[name] and not found.sides[name]:
                less = f" - {self.response_limit}" if self.response_limit else ""
                raise ValueError(
                    f"no prompt fits: all {found.too_long[name]} of {self.path} are empty or longer than "
                    f"{self.max_tokens} tokens (model.max_tokens{less})"
                )
        return FilterResult(
            path=self.path,
            max_tokens=self.max_tokens,
            response_limit=self.response_limit,
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

    def _sort(self, batch: Sequence[Row | str | None], found: "_FilterCounts") -> None:
        kept: list[tuple[int, RawProblem, str, list[str]]] = []
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
                what = "row" if self.form.response_field else "prompt"
                found.bad.append(BadRow.of_size(number, size, max_tokens=self.max_tokens, path=self.path, what=what))

    def _prompt_of(self, number: int, row: Row | str) -> BadRow | tuple[RawProblem, str, list[str]]:
        """Returns (problem, side, texts to measure), or a `BadRow`; a supervised row has a text per sequence."""
        raw = row if isinstance(row, str) else parse_row(number, row, self.form)
        if isinstance(raw, str):
            return BadRow(number, raw, self.path)
        if number in self.gold_failures:
            return BadRow(number, self.gold_failures[number], self.path)
        side = self.side(raw)
        if side not in self.measured:
            return raw, side, []
        try:
            if self.form.response_field:
                sequences = render_completions(raw, self.tokenizer, self.prompts)
                return raw, side, [joined(pieces) for pieces in sequences]
            return raw, side, [render(raw, self.tokenizer, self.prompts)]
        except ValueError as e:  # the chat template rejects the roles or their order
            return BadRow(number, str(e), self.path)

    def _sizes(self, kept: Sequence[tuple[int, RawProblem, str, list[str]]]) -> list[int | None]:
        """Returns the tokens of each row's longest text, or None if its side is not measured."""
        sizes = iter(self.tokenizer.num_tokens([text for *_, texts in kept for text in texts]))
        return [max((next(sizes) for _ in texts), default=None) for *_, texts in kept]


def _quantiles(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(q) for q in np.quantile(sizes, (0.5, 0.9, 0.99, 1), method="higher")) if sizes else ()


class _FilterCounts:
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
        """Records a kept row under its side."""
        self.sides[side].append(index)
        self.digest.update(
            repr(
                (side, raw.question, raw.messages, raw.task, raw.task.environment, raw.tools, raw.template_arguments)
                + ((raw.response,) if raw.response else ())
            ).encode()
        )
        question, answer = hash(raw.question.strip()), hash(raw.task.answer)
        if self._answers.setdefault(question, answer) != answer:
            self.contradicting.add(question)

    @property
    def num_too_long(self) -> int:
        return sum(self.too_long.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldRow:
    """Row of a file and the task that scores its reference answer."""

    source: str
    """Name of the source; empty for a single source."""
    row: int
    """Row number, from 1."""
    question: str
    task: Task
    """Task with the reference answer; for verifier `code`, the metadata holds a reference program instead."""


def gold_rows(prompts: PromptsConfig, *, limit: int = 0) -> Iterator[GoldRow]:
    """Yields the well-formed rows of all files and data sets, source by source, to check their reference answers.

    Yields up to `limit` evenly spread rows per source, or all if it is 0. Evaluation files and environments are
    skipped. Raises ValueError if a file is unusable.
    """
    for name, source in prompts.sources.items():
        if not source.path or source.environment:
            continue
        form = dataclasses.replace(RowFormat.of(prompts, source), teacher_field="")  # no part of an answer
        rows = open_rows(source, form.columns)
        indices = range(len(rows))
        if 0 < limit < len(rows):
            indices = [int(i) for i in np.linspace(0, len(rows) - 1, limit)]
        for index in indices:
            row = rows[index]
            raw = parse_row(index + 1, row, form) if isinstance(row, dict) else None
            if isinstance(raw, RawProblem):
                yield GoldRow(source=name, row=raw.row, question=raw.question, task=raw.task)


SetAside = Mapping[str, Mapping[int, str]]
"""Reasons by source and row number for rows whose reference answer fails validation."""


class Quarantine:
    """File of the run's quarantined rows, one JSON object per row; restarts never duplicate a row."""

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        self._there = {(line["source"], line["row"]) for line in json_lines(file)}

    def add(self, *bad: BadRow) -> None:
        """Appends the rows that the file does not list yet."""
        new = [row for row in bad if (row.path, row.row) not in self._there]
        if not new:
            return
        self._there |= {(row.path, row.row) for row in new}
        with open(self._file, "a", encoding="utf-8") as out:
            for row in new:
                out.write(json.dumps({"source": row.path, "row": row.row, "reason": row.reason}) + "\n")
        logging.warning("rows quarantined count=%d file=%s", len(new), self._file)


def write_gold_failures(file: pathlib.Path, gold_failures: SetAside) -> None:
    """Writes the failures for `read_gold_failures`, which every start of the run calls."""
    text = json.dumps({source: {str(row): why for row, why in rows.items()} for source, rows in gold_failures.items()})
    replace_file(file, text.encode())


def read_gold_failures(file: pathlib.Path) -> SetAside:
    """Returns reasons by source and row, or {} without the file; raises ValueError if it is invalid."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        return {source: {int(row): str(why) for row, why in rows.items()} for source, rows in found.items()}
    except (ValueError, AttributeError) as e:
        raise ValueError(
            f"{file} is not a valid list of quarantined rows: {e}; remove it and set up the run again"
        ) from e
