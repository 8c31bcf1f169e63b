"""HTML page of the report.

Text from models, environments and datasets is untrusted. It reaches the page only through the escaping template, or as
JSON that the script inserts as text. Other scripts have no nonce and do not run.
"""

import dataclasses
import json
import math
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

import jinja2
from bokeh.embed import components
from bokeh.models import Model
from bokeh.resources import Resources
from markupsafe import Markup

from launch.tools.report.run_data import spread_out
from launch.tools.samples.samples_view import GroupLine, ResponseLine, Samples, visible
from learner.metrics.sample_record import cut


def json_for_script(value: Any) -> str:
    r"""Returns JSON that is safe in a script element, without `<`, `>` or `&`.

    It is pure ASCII: lone surrogates and line separators stay JSON escapes, and its length equals its size in bytes.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # non-ASCII characters are escaped already
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


_FOLDER = pathlib.Path(__file__).parent
_SCRIPTS = ("state.js", "curves.js", "timeline.js", "samples.js", "page.js")
"""Parts of the page's script in order; they share one scope."""


def render(*, models: Mapping[str, Model], data: Mapping[str, Any], follow: str, **values: Any) -> str:
    """Returns the HTML page with figures by id, the script's `data`, and further template values, shown as text.

    `follow` is the version of a served page, which polls for newer ones; empty in a file.
    """
    nonce = secrets.token_urlsafe(16)
    script, figures = components(dict(models), wrap_script=False) if models else ("", {})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        **values,
        nonce=nonce,
        follow=follow,
        figures={name: Markup(figure) for name, figure in figures.items()},
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        library=Markup(_in_script("\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw))),
        figures_script=Markup(_in_script(script)),
        page_script=Markup(_in_script(_page_script())),
        data=Markup(json_for_script(data)),
    )


def _page_script() -> str:
    parts = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _in_script(source: str) -> str:
    r"""Escapes source code in a script element; `<\/` in strings, where alone it may occur, equals `</`."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


BUDGET_BYTES = 3_000_000
"""Maximum bytes of all samples of a report in the page."""
MAX_CHARS = 6_000
"""Maximum characters of one text; the run has usually shortened longer texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownSamples:
    """Samples of a run on the page."""

    groups: list[dict[str, Any]]
    num_shown: int
    """Number of responses on the page."""
    num_kept: int
    """Number of responses in samples.jsonl."""
    num_unreadable: int
    """Number of unreadable lines of samples.jsonl."""


def shown_samples(samples: Samples, *, budget_bytes: int) -> ShownSamples:
    """Returns groups within `budget_bytes`, evenly over the run; evaluations get half, or what training leaves."""
    rows = [_group(group) for group in samples.groups]
    sizes = [len(json_for_script(row)) + 1 for row in rows]
    evals = [i for i, row in enumerate(rows) if row["kind"] == "eval"]
    trained = [i for i, row in enumerate(rows) if row["kind"] != "eval"]
    size_of_trained = sum(sizes[i] for i in trained)
    for_evals = max(budget_bytes // 2, budget_bytes - size_of_trained)
    kept = _fitting(evals, sizes, for_evals)
    kept += _fitting(trained, sizes, budget_bytes - sum(sizes[i] for i in kept))
    groups = [rows[i] for i in sorted(kept)]
    return ShownSamples(
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


def _response(response: ResponseLine) -> dict[str, Any]:
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
    always, also_zero = ("reward", "tokens"), ("advantage", "lag")
    return {
        name: value
        for name, value in row.items()
        if value not in (None, [], "", 0) or name in always or (name in also_zero and value == 0)
    }


def _finite(value: float | None) -> float | None:
    """Returns None for values that JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    return visible(cut(text, MAX_CHARS))
