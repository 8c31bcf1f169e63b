"""What is kept of evaluations: a line of evaluations.jsonl for each evaluation of a set (docs/evaluation.md)."""

import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.files import replace_file
from bridge.types import Group
from learner.data.problems import Problem
from learner.data.sets import ProblemSet
from learner.evaluation.summary import Summary, answer_of

FORMAT = 1
"""Goes up when a field changes its meaning or goes away."""
MAX_CHARS = 8_000
"""Of a prompt or a response; a longer one is cut in its middle."""
MAX_SHOWN_SAMPLES = 8
"""Responses of a problem that are kept."""

Decode = Callable[[Sequence[int]], str]
Json = dict[str, Any]


def result_of(summary: Summary) -> Json:
    """A summary as JSON; NaN is null."""
    return {
        "k": summary.k,
        "problems": summary.num_problems,
        "left_out": summary.num_left_out,
        "metrics": {
            name: {"value": _number(e.value), "stderr": _number(e.stderr)} for name, e in summary.estimates.items()
        },
        "notes": list(summary.notes),
        "scores": {name: _number(score) for name, score in summary.scores.items()},
        "verdicts": dict(summary.verdicts),
        "truncated": summary.num_truncated,
        "response_tokens": _number(summary.mean_response_tokens),
        "thinking_tokens": _number(summary.mean_thinking_tokens),
        "thinking_unfinished": _number(summary.unfinished),
        "turns": _number(summary.mean_turns),
        "version": summary.first_step,
        "last_version": summary.last_step,
    }


def asked_of(one: ProblemSet) -> Json:
    """How a set was asked."""
    how = one.how
    return {
        "set": one.name,
        "source": how.path or how.task or how.environment or "held-out problems of prompts",
        "temperature": how.temperature,
        "top_p": how.top_p,
        "max_tokens": how.max_tokens,
        "pass_reward": how.pass_reward,
    }


def samples_of(
    problems: Mapping[int, Problem], groups: Mapping[int, Group], decode: Decode, *, limit: int
) -> list[Json]:
    """What is shown of some problems, by their number: the first, the last and what lies evenly between.

    Args:
      problems: by number.
      groups: their groups, by the same number.
      decode: from tokens to text.
      limit: problems at most.
    """
    there = sorted(groups)
    chosen = there if len(there) <= limit else [there[i] for i in np.linspace(0, len(there) - 1, limit).astype(int)]
    return [_shown(number, problems[number], groups[number], decode) for number in chosen if limit]


def _shown(number: int, problem: Problem, group: Group, decode: Decode) -> Json:
    return {
        "problem": number,
        "prompt": _cut(problem.question),
        "answer": _cut(problem.task.answer),
        "responses": [
            {
                "text": _cut(decode(r.tokens.tolist())),
                "reward": r.reward,
                "scores": {score.name: score.value for score in r.scores},
                "verdicts": {score.name: score.verdict for score in r.scores},
                "answer": answer_of(r),
                "finish": r.finish,
                "tokens": int(np.count_nonzero(r.loss_mask)),
                "thinking_tokens": r.num_thinking_tokens,
                "turns": r.num_turns,
                "version": int(r.token_versions[0]),
                "last_version": int(r.token_versions[-1]),
            }
            for r in group.rollouts[:MAX_SHOWN_SAMPLES]
        ],
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class EvaluationLog:
    """A run's evaluations.jsonl: each evaluation of a set once, also over restarts."""

    def __init__(self, file: pathlib.Path, *, there: Collection[tuple[str, int]]) -> None:
        """Opens it for more; what is not in `there`, the (set, step) of the run's metrics, is dropped.

        A learner that goes back to a checkpoint evaluates anew what it did after it, and one that was killed between a
        record and its row of metrics does so, too.
        """
        kept = [r for r in read_evaluations(file) if (r["set"], r["step"]) in there]
        replace_file(file, "".join(_line(r) for r in kept).encode())
        self._file = open(file, "a", encoding="utf-8")  # noqa: SIM115  # open as long as the run

    def add(self, record: Json) -> None:
        """Appends a record; it is on disk when this returns."""
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_evaluations(file: pathlib.Path) -> list[Json]:
    """All records of a file, in the order in which they were made; none where there is no file.

    A torn last line of a killed process is left out.

    Raises:
      ValueError: a line that is no record, or one of another format.
    """
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    records: list[Json] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as e:
            if number == len(lines):
                break
            raise ValueError(f"{file}:{number}: not JSON: {e}") from e
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"{file}:{number}: wanted a record of format {FORMAT}")
        records.append(record)
    return records


def _line(record: Json) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
