"""Which samples are shown, in which order. Pure."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from launch.tools.samples.samples_view import SampleEntry

SORTS = ("step", "reward", "lag", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """What is asked for."""

    sort: str = "step"
    """One of `SORTS`; the largest first."""
    reverse: bool = False
    grep: re.Pattern[str] | None = None
    """Found in the prompt or in the response."""
    steps: tuple[int, int] | None = None
    """First and last step, both included."""
    is_eval: bool | None = None
    """Only evaluations, or only training; None: both."""
    limit: int = 10


def choose(samples: Iterable[SampleEntry], query: Query) -> tuple[list[SampleEntry], int]:
    """The samples asked for, and how many there were without the limit; of equals the newest first."""
    found = [s for s in samples if _fits(s, query)]
    found.reverse()
    found.sort(key=lambda s: _key(s, query.sort), reverse=not query.reverse)
    return found[: query.limit], len(found)


def pairs(samples: Iterable[SampleEntry], *, limit: int) -> list[tuple[SampleEntry, SampleEntry]]:
    """The same problem at the first and at the last evaluation that has it, for `limit` problems in their order.

    A problem is the same by its prompt, as its place in the set may change; by that place only where the run didn't
    write the prompt's id. They are not chosen by what came of them.
    """
    of_problem: dict[tuple[str, str], list[SampleEntry]] = {}
    for sample in samples:
        group = sample.group
        if group.kind == "eval" and sample.index == 0:
            of_problem.setdefault((group.set, group.prompt_id or f"number {group.order}"), []).append(sample)
    by_step = [sorted(of, key=lambda s: s.group.step) for of in of_problem.values()]
    found = [(of[0], of[-1]) for of in by_step if of[0].group.step < of[-1].group.step]
    return sorted(found, key=lambda pair: (pair[0].group.set, pair[0].group.order))[:limit]


def as_json(sample: SampleEntry) -> dict[str, Any]:
    """A sample as a line of `--json`: its group's fields as samples.jsonl has them, with one `response`."""
    fields: dict[str, Any] = msgspec.to_builtins(sample.group)
    del fields["responses"]
    return {**fields, "index": sample.index, "response": msgspec.to_builtins(sample.response)}


def parse_steps(text: str) -> tuple[int, int]:
    """Reads `40` or `40-60`.

    Raises:
      ValueError: it is neither.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise ValueError(f"--step is a step or a range of them, as 40 or 40-60, got {text!r}")
    return first, last


def _fits(sample: SampleEntry, query: Query) -> bool:
    group = sample.group
    if query.is_eval is not None and query.is_eval != (group.kind == "eval"):
        return False
    if query.steps is not None and not query.steps[0] <= group.step <= query.steps[1]:
        return False
    if query.grep is None:
        return True
    return any(query.grep.search(text) for text in (group.prompt, *(p.text for p in sample.response.parts)))


def _key(sample: SampleEntry, sort: str) -> float:
    match sort:
        case "reward":
            return sample.response.reward
        case "lag":  # an evaluation's have none
            return -1.0 if sample.response.lag is None else sample.response.lag
        case "length":
            return sample.response.tokens
        case _:
            return sample.group.step
