"""The samples of a report: as many as it may hold, evenly over the run. Pure."""

import dataclasses
import math
from typing import Any

from launch.report.page.escaping import json_for_script
from launch.report.thinning import spread_out
from launch.samples.read import GroupLine, Response, Samples
from launch.samples.text import visible

BUDGET_BYTES = 3_000_000
"""Of all samples of a report together, as they stand in the page."""
MAX_CHARS = 6_000
"""Of one text; what is longer was cut already, unless the run says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """The samples of a run that the page has."""

    groups: list[dict[str, Any]]
    num_shown: int
    """Responses, as the next."""
    num_kept: int
    """In samples.jsonl."""
    num_unreadable: int
    """Lines of it."""


def shown_samples(samples: Samples, *, budget_bytes: int) -> Shown:
    """The groups that fit `budget_bytes`, evenly over the run; evaluations may take half of it, training the rest."""
    rows = [_group(group) for group in samples.groups]
    sizes = [len(json_for_script(row)) + 1 for row in rows]
    evals = [i for i, row in enumerate(rows) if row["kind"] == "eval"]
    trained = [i for i, row in enumerate(rows) if row["kind"] != "eval"]
    size_of_trained = sum(sizes[i] for i in trained)
    for_evals = max(budget_bytes // 2, budget_bytes - size_of_trained)
    kept = _fitting(evals, sizes, for_evals)
    kept += _fitting(trained, sizes, budget_bytes - sum(sizes[i] for i in kept))
    groups = [rows[i] for i in sorted(kept)]
    return Shown(
        groups=groups,
        num_shown=sum(len(g["responses"]) for g in groups),
        num_kept=samples.num_responses,
        num_unreadable=samples.num_unreadable,
    )


def _fitting(indices: list[int], sizes: list[int], budget_bytes: int) -> list[int]:
    return [indices[i] for i in spread_out([sizes[j] for j in indices], budget=budget_bytes)]


def _group(group: GroupLine) -> dict[str, Any]:
    return {
        "kind": "eval" if group.kind == "eval" else "train",
        "set": _text(group.set),
        "step": group.step,
        "round": group.round,
        "ticket": _text(group.ticket),
        "problem": _text(group.prompt_id),
        "source": _text(group.source),
        "environment": _text(group.environment),
        "prompt": _text(group.prompt),
        "answer": _text(group.answer),
        "about": "" if group.metadata == "{}" else _text(group.metadata),
        "of": group.num_responses,
        "responses": [_response(r) for r in group.responses],
    }


def _response(response: Response) -> dict[str, Any]:
    parts = [[p.by == "policy", _text(p.text)] for p in response.parts]
    row = {
        "parts": parts,
        "left_out": max(0, response.num_parts - len(response.parts)),
        "reward": _finite(response.reward),
        "scores": [[_text(name), _finite(s.value), _text(s.verdict)] for name, s in response.scores.items()],
        "turn_rewards": [_finite(r) for r in response.turn_rewards],
        "advantage": _finite(response.advantage),
        "turn_advantages": [_finite(a) for a in response.turn_advantages],
        "lag": _finite(response.lag),
        "lag_max": response.lag_max,
        "versions": [response.min_version, response.max_version],
        "tokens": response.tokens,
        "observed": response.observed_tokens,
        "finish": _text(response.finish),
        "actor": _text(response.actor),
    }
    return {
        name: value for name, value in row.items() if value not in (None, [], "", 0) or name in ("reward", "tokens")
    }


def _finite(value: float | None) -> float | None:
    """None of what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
    return visible(text)
