"""Opening of prompt sources: the training and held-out problems of each.

Imports neither grain nor jax, because `launch.startup.preflight` checks prompts before anything starts.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from absl import logging
from jaxtyping import Int64

from configs.schema import Config
from configs.sections.prompts import PromptSource
from learner.data.generated import open_generated
from learner.data.mixture import apportion
from learner.data.parse_row import RowFormat, parse_row
from learner.data.problem import Problem, RawProblem, question_key
from learner.data.readers import Rows, open_rows
from learner.data.row_filter import FilterResult, RowFilter, SetAside
from learner.data.source_context import OpenedSource, SourceContext, where
from learner.data.tokenizer import Tokenizer


def open_eval_rows(source: PromptSource, form: RowFormat) -> Rows | None:
    """Returns the rows of the source's evaluation file or split, or None if a hash selects held-out rows."""
    if source.eval_path:
        return open_rows(source, form.columns, path=source.eval_path, split=source.eval_split)
    return open_rows(source, form.columns, split=source.eval_split) if source.eval_split else None


def questions(rows: Rows, form: RowFormat) -> set[str]:
    """Returns the keys of the questions of all well-formed rows (`question_key`)."""
    found: set[str] = set()
    first = 1
    for batch in rows.batches():
        for number, row in enumerate(batch, start=first):
            raw = parse_row(number, row, form) if isinstance(row, dict) else None
            if isinstance(raw, RawProblem):
                found.add(question_key(raw))
        first += len(batch)
    return found


class FileProblems:
    """Kept rows of a file, by position among them; each access parses and tokenizes its row."""

    def __init__(
        self, rows: Rows, kept: Int64[np.ndarray, " N"], name: str, source: PromptSource, setting: SourceContext
    ) -> None:
        """Stores the rows; `kept` are indices into `rows`, the rows of source `name`."""
        self._rows, self._kept, self._name, self._setting = rows, kept, name, setting
        self._form = setting.form(source)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Problem:
        """Returns problem `index`, or raises ValueError if its row changed since the scan."""
        place = int(self._kept[index])
        row = self._rows[place]
        raw = parse_row(place + 1, row, self._form) if isinstance(row, dict) else row
        if not isinstance(raw, RawProblem):
            raise ValueError(f"row {place + 1} of {self._form.source.path} changed while the run read it: {raw}")
        return self._setting.tokenize(raw, self._name)


def open_file(
    name: str,
    setting: SourceContext,
    *,
    eval_rows: Rows | None,
    num_held_out: int,
    gold_failures: Mapping[int, str],
) -> OpenedSource:
    """Opens a source of rows, scans it and logs the counts.

    Holds out at most `num_held_out` of `eval_rows`, or of the rows that a hash selects if it is None. `gold_failures`
    are reasons by row number for rows whose reference answer fails validation. Raises ValueError if the file is
    unusable, or leaves no problem to train on or to evaluate.
    """
    source = setting.config.prompts.sources[name]
    form = setting.form(source)
    rows = open_rows(source, form.columns)

    def side(raw: RawProblem) -> str:
        if eval_rows is None and setting.is_held_out(raw):
            return "held_out"
        return "neither" if setting.is_evaluated(raw) else "train"

    screen = RowFilter(
        path=source.path,
        form=form,
        tokenizer=setting.tokenizer,
        prompts=setting.config.prompts,
        max_tokens=setting.max_tokens,
        response_limit="" if setting.config.loss.is_supervised else "sampling.max_response_tokens",
        side=side,
        measured=("train", "held_out") if num_held_out else ("train",),
        gold_failures=gold_failures,
    )
    found = screen.scan(rows)
    held_rows, held_out, held_setting, bad = rows, found.held_out, setting, found.bad
    of_eval = None
    if eval_rows is not None and num_held_out:
        path = source.eval_path or f"{source.path} ({source.eval_split})"
        held_setting = dataclasses.replace(setting, is_evaluation=True)
        of_eval = dataclasses.replace(
            screen, path=path, form=held_setting.form(source), side=lambda _: "held_out", gold_failures={}
        ).scan(eval_rows)
        held_rows, held_out, bad = eval_rows, of_eval.held_out, bad + of_eval.bad
    _log_counts(name, source, found, num_held_out=len(held_out))
    if not len(found.train) or (num_held_out and not len(held_out)):
        raise ValueError(
            f"{source.path}: {len(found.train)} rows to train on and {len(held_out)} held out; both are needed (set "
            f"{where(name)}.eval_path, or change prompts.held_out_one_in)"
        )
    held = FileProblems(held_rows, held_out[:num_held_out], name, source, held_setting)
    return OpenedSource(
        name=name,
        source=source,
        problems=FileProblems(rows, found.train, name, source, setting),
        is_endless=False,
        held_out=tuple(held[i] for i in range(len(held))),
        bad=bad,
        looked_at=(found,) if of_eval is None else (found, of_eval),
    )


def _log_counts(name: str, source: PromptSource, found: FilterResult, *, num_held_out: int) -> None:
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


def held_out_of(opened: Sequence[OpenedSource]) -> list[Problem]:
    """Returns the held-out problems; any prefix, as small sets and probes take, has each source's share."""
    placed = [((i + 0.5) / len(s.held_out), problem) for s in opened for i, problem in enumerate(s.held_out)]
    return [problem for _, problem in sorted(placed, key=lambda one: one[0])]


def open_sources(
    config: Config, tokenizer: Tokenizer, *, gold_failures: SetAside | None = None, evaluated: Collection[str] = ()
) -> list[OpenedSource]:
    """Opens all sources in config order, and logs how many rows of each are kept.

    `evaluation.num_problems` held-out problems are drawn in proportion to the source weights. No source trains on a
    problem that an evaluation file, an evaluation set or another source holds out. `evaluated` are the question keys of
    the evaluation sets (`learner.evaluation.eval_sets.questions_of`).

    Raises ValueError if a source is unusable or leaves no problem to train on or to evaluate, or if
    `prompts.num_epochs` is too low.
    """
    sources = config.prompts.sources
    evaluation = SourceContext(config, tokenizer, is_evaluation=True)
    of_eval: dict[str, Rows] = {}
    kept_out = set(evaluated)
    for name, source in sources.items():
        if (rows := open_eval_rows(source, evaluation.form(source))) is not None:
            of_eval[name] = rows
            kept_out |= questions(rows, evaluation.form(source))
    setting = SourceContext(config, tokenizer, evaluated=frozenset(kept_out))
    shares = apportion({name: source.weight for name, source in sources.items()}, config.evaluation.num_problems)
    opened: dict[str, OpenedSource] = {}
    # Sources that hold out by hash come first. The hash already excludes their held-out questions from each other, and
    # sources with an evaluation file exclude them by text.
    for name in sorted(sources, key=lambda name: name in of_eval):
        if sources[name].path:
            opened[name] = open_file(
                name,
                setting,
                eval_rows=of_eval.get(name),
                num_held_out=shares[name],
                gold_failures=(gold_failures or {}).get(name, {}),
            )
        else:
            opened[name] = open_generated(name, setting, num_held_out=shares[name])
        if name not in of_eval:
            kept_out |= {question_key(p) for p in opened[name].held_out}
            setting = dataclasses.replace(setting, evaluated=frozenset(kept_out))
    in_order = [opened[name] for name in sources]
    check_epochs(config, in_order)
    return in_order


def check_epochs(config: Config, opened: Sequence[OpenedSource]) -> None:
    """Raises ValueError if the run needs the rows of a file more than `prompts.num_epochs` times."""
    bound = config.prompts.num_epochs
    per_update, unit = config.groups_per_update, "rows" if config.loss.is_supervised else "groups"
    all_weights = sum(o.source.weight for o in opened)
    for source in opened if bound else ():
        if source.is_endless:
            continue
        num_groups = bound * len(source.problems) * all_weights / source.source.weight
        num_updates = int(num_groups + 1e-6) // per_update
        if num_updates < config.run.num_updates:
            raise ValueError(
                f"run.num_updates: expected at most {num_updates} updates of {per_update} {unit} from the "
                f"{len(source.problems)} rows of {source.source.path} (prompts.num_epochs={bound}), got "
                f"{config.run.num_updates}"
            )
