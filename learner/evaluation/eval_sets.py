"""Problems of evaluation sets, from the set's own source or the run's held-out problems. Imports no jax."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from absl import logging

from bridge.rollout_types import Sampling
from configs.schema import Config
from configs.sections.evaluation import EvaluationSet
from configs.sections.prompts import READS_ANSWERS
from learner.data.generated import draw_held_out
from learner.data.open_sources import FileProblems
from learner.data.problem import BadRow, Problem, question_key
from learner.data.readers import open_rows
from learner.data.row_filter import FilterResult, RowFilter
from learner.data.source_context import SourceContext
from learner.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """Evaluation set after opening."""

    name: str
    config: EvaluationSet
    """Config of the set with all defaults filled in."""
    problems: tuple[Problem, ...]
    bad: tuple[BadRow, ...] = ()
    looked_at: tuple[FilterResult, ...] = ()
    """Scan results, as in `OpenedSource`."""

    @property
    def digest(self) -> str:
        """Hash of the rows; empty for generated rows."""
        return "-".join(one.digest for one in self.looked_at)

    def requests(self, stop_token_ids: tuple[int, ...]) -> tuple[list[tuple[Problem, int]], Sampling]:
        """Returns the (problem, samples) pairs and how they are sampled; `stop_token_ids` end a response."""
        sampling = Sampling(
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature or 0.0,
            top_p=1.0 if self.config.top_p is None else self.config.top_p,
            stop_token_ids=stop_token_ids,
        )
        return [(problem, self.config.k) for problem in self.problems], sampling

    @property
    def reads_answers(self) -> bool:
        """True if every problem has a built-in verifier that reports which answer a response gives."""
        return all(any(part.name in READS_ANSWERS for part in p.task.rewards) for p in self.problems)


def open_own_sets(config: Config, tokenizer: Tokenizer) -> dict[str, ProblemSet]:
    """Opens the sets with their own source and logs row counts; raises ValueError if no problem is usable."""
    setting = SourceContext(config, tokenizer, is_evaluation=True)
    sets = {name: how for name, how in config.evaluation_sets.items() if how.has_source}
    return {name: _open(name, how, setting) for name, how in sets.items()}


def questions_of(sets: Mapping[str, ProblemSet]) -> set[str]:
    """Returns the keys of the sets' questions (`question_key`), which are excluded from training."""
    return {question_key(problem) for one in sets.values() for problem in one.problems}


def all_sets(config: Config, own: Mapping[str, ProblemSet], held_out: Sequence[Problem]) -> list[ProblemSet]:
    """Returns all sets in config order; raises ValueError if a held-out prompt leaves no room for responses."""
    return [
        own[name] if how.has_source else _of_held_out(name, how, held_out[: how.num_problems], config.model.max_tokens)
        for name, how in config.evaluation_sets.items()
    ]


def bad_rows(sets: Iterable[ProblemSet]) -> list[BadRow]:
    """Returns the quarantined rows of the sets."""
    return [row for one in sets for row in one.bad]


def _open(name: str, how: EvaluationSet, setting: SourceContext) -> ProblemSet:
    setting = dataclasses.replace(setting, response_tokens=how.max_tokens)
    field = f"evaluation.sets.{name}"
    if not how.path:
        problems, bad = draw_held_out(
            how, setting, how.num_problems, name=name, field=field, bound=f"{field}.num_problems"
        )
        return ProblemSet(name=name, config=how, problems=tuple(problems), bad=tuple(bad))
    form = setting.form(how)
    rows = open_rows(how, form.columns)
    found = RowFilter(
        path=how.path,
        form=form,
        tokenizer=setting.tokenizer,
        prompts=setting.config.prompts,
        max_tokens=setting.max_tokens,
        response_limit="" if setting.config.loss.is_supervised else f"{field}.max_tokens",
        side=lambda _: "held_out",
    ).scan(rows)
    kept = found.held_out[: how.num_problems] if how.num_problems else found.held_out
    held = FileProblems(rows, kept, name, how, setting)
    logging.info(
        "evaluation set=%s path=%s rows=%d evaluated=%d invalid=%d",
        name,
        how.path,
        found.num_rows,
        len(kept),
        len(found.bad),
    )
    problems = tuple(held[i] for i in range(len(held)))
    return ProblemSet(name=name, config=how, problems=problems, bad=found.bad, looked_at=(found,))


def _of_held_out(name: str, how: EvaluationSet, problems: Sequence[Problem], max_tokens: int) -> ProblemSet:
    # The completion of a supervised row is part of it, and nothing is sampled.
    longest = max((p.prompt_tokens.size for p in problems if not p.completions), default=0)
    if longest + how.max_tokens > max_tokens:
        raise ValueError(
            f"evaluation.sets.{name}.max_tokens ({how.max_tokens}) and the longest held-out prompt, {longest} tokens, "
            f"do not fit model.max_tokens ({max_tokens})"
        )
    return ProblemSet(name=name, config=how, problems=tuple(problems))
