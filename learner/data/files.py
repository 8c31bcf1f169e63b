"""Sources that are rows: of a file, or of a data set."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging
from jaxtyping import Int64

from configs.sections.prompt_source import HUGGING_FACE, PromptSource
from learner.data.filters import Screen, Screened
from learner.data.problems import Problem, RawProblem
from learner.data.rows import RowFormat, parse_row
from learner.data.setting import Opened, Setting, where
from learner.data.sources import hugging_face
from learner.data.sources.rows import JsonLines, Rows, read_parquet


def open_rows(source: PromptSource, columns: Sequence[str], *, path: str = "", split: str = "") -> Rows:
    """The rows of a source's file or data set; of its evaluation's with another `path` or `split`.

    Raises:
      ValueError: there is none, or it has another format.
    """
    path = path or source.path
    if path.startswith(HUGGING_FACE):
        return hugging_face.load(dataclasses.replace(source, path=path), columns, split=split or source.split)
    if path.endswith((".arrayrecord", ".array_record")):
        from learner.data.sources.array_record import ArrayRecordRows  # its library is there on Linux and macOS only

        return ArrayRecordRows(path)
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"no prompts file {path!r}")
    if file.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompts must be .jsonl, .parquet, .arrayrecord or hf:NAME, got {path!r}")
    return read_parquet(file, columns) if file.suffix == ".parquet" else JsonLines(file)


def open_eval_rows(source: PromptSource, form: RowFormat) -> Rows | None:
    """The rows that the source names for evaluation; None if those are chosen by their hash.

    Raises:
      ValueError: as `open_rows`.
    """
    if source.eval_path:
        return open_rows(source, form.columns, path=source.eval_path)
    return open_rows(source, form.columns, split=source.eval_split) if source.eval_split else None


def questions(rows: Rows, form: RowFormat) -> set[str]:
    """The questions, stripped, of all well-formed rows."""
    found: set[str] = set()
    first = 1
    for batch in rows.batches():
        for number, row in enumerate(batch, start=first):
            raw = parse_row(number, row, form) if isinstance(row, dict) else None
            if isinstance(raw, RawProblem):
                found.add(raw.question.strip())
        first += len(batch)
    return found


class FileProblems:
    """Rows of a file by their place among those kept; each is parsed and tokenized when it is asked for."""

    def __init__(
        self, rows: Rows, kept: Int64[np.ndarray, " N"], name: str, source: PromptSource, setting: Setting
    ) -> None:
        """`kept` are indices into `rows`, which are those of source `name`."""
        self._rows, self._kept, self._name, self._setting = rows, kept, name, setting
        self._form = setting.form(source)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Problem:
        """Problem `index`.

        Raises:
          ValueError: its row is not what it was.
        """
        place = int(self._kept[index])
        row = self._rows[place]
        raw = parse_row(place + 1, row, self._form) if isinstance(row, dict) else row
        if not isinstance(raw, RawProblem):
            raise ValueError(f"row {place + 1} of {self._form.source.path} changed while the run read it: {raw}")
        return self._setting.tokenize(raw, self._name)


def open_file(
    name: str,
    setting: Setting,
    *,
    eval_rows: Rows | None,
    num_held_out: int,
    set_aside: Mapping[int, str],
) -> Opened:
    """A source of rows: what is trained on, held out, and set aside; logs how many.

    Args:
      name: the source's.
      setting: the run's.
      eval_rows: what is held out; chosen by hash if None.
      num_held_out: so many are evaluated.
      set_aside: reasons by row number, of rows whose own answer does not pass.

    Raises:
      ValueError: the file is unusable, or leaves nothing to train on or to evaluate.
    """
    source = setting.config.prompts.sources[name]
    form = setting.form(source)
    rows = open_rows(source, form.columns)

    def side(raw: RawProblem) -> str:
        if eval_rows is None and setting.is_held_out(raw):
            return "held_out"
        return "neither" if setting.is_evaluated(raw) else "train"

    screen = Screen(
        path=source.path,
        form=form,
        tokenizer=setting.tokenizer,
        prompts=setting.config.prompts,
        max_tokens=setting.max_tokens,
        side=side,
        measured=("train", "held_out") if num_held_out else ("train",),
        set_aside=set_aside,
    )
    found = screen.look(rows)
    held_rows, held_out, bad = rows, found.held_out, found.bad
    of_eval = None
    if eval_rows is not None and num_held_out:
        path = source.eval_path or f"{source.path} ({source.eval_split})"
        of_eval = dataclasses.replace(screen, path=path, side=lambda _: "held_out", set_aside={}).look(eval_rows)
        held_rows, held_out, bad = eval_rows, of_eval.held_out, bad + of_eval.bad
    _log_counts(name, source, found, num_held_out=len(held_out))
    if not len(found.train) or (num_held_out and not len(held_out)):
        raise ValueError(
            f"{source.path}: {len(found.train)} rows to train on and {len(held_out)} held out; both are needed (set "
            f"{where(name)}.eval_path, or change prompts.held_out_one_in)"
        )
    held = FileProblems(held_rows, held_out[:num_held_out], name, source, setting)
    return Opened(
        name=name,
        source=source,
        problems=FileProblems(rows, found.train, name, source, setting),
        is_endless=False,
        held_out=tuple(held[i] for i in range(len(held))),
        bad=bad,
        looked_at=(found,) if of_eval is None else (found, of_eval),
    )


def _log_counts(name: str, source: PromptSource, found: Screened, *, num_held_out: int) -> None:
    logging.info(
        "prompts source=%s path=%s rows=%d kept=%d held_out=%d too_long=%d bad=%d in_evaluation=%d "
        "contradicting_duplicates=%d",
        name or "-",
        source.path,
        found.num_rows,
        len(found.train),
        num_held_out,
        found.num_too_long,
        len(found.bad) - found.num_too_long,
        found.num_left_out,
        found.num_contradicting,
    )
