"""Builder of the report of one or several runs as an HTML page.

Text from models, environments and datasets is untrusted. It reaches the page only through the escaping template, or as
JSON that the script inserts as text. Other scripts have no nonce and do not run.
"""

import dataclasses
import datetime
import math
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from bokeh.embed import components
from bokeh.models import Model
from bokeh.resources import Resources
from markupsafe import Markup

from bridge.files import replace_file
from launch.tools.report import figures, fixed_figures, run_data, summary, timeline_spans
from launch.tools.report.run_data import RunData, json_for_script, read_runs, spread_out
from launch.tools.report.timeline_rounds import Fault
from launch.tools.report.timeline_spans import KINDS
from launch.tools.samples.samples_view import GroupLine, ResponseLine, Samples, read_samples, visible
from learner.metrics.sample_record import cut

Json = dict[str, Any]
_FOLDER = pathlib.Path(__file__).parent
_SCRIPTS = ("state.js", "curves.js", "timeline.js", "samples.js", "page.js")
"""Parts of the page's script in order; they share one scope."""
BUDGET_BYTES = 3_000_000
"""Maximum bytes of all samples of a report in the page."""
MAX_CHARS = 6_000
"""Maximum characters of one text; the run has usually shortened longer texts."""


def write_report(folders: Sequence[pathlib.Path], target: pathlib.Path, *, results: Sequence[pathlib.Path] = ()) -> int:
    """Writes the report of runs into `target`, as `build` returns it; returns its size in bytes."""
    page = build(folders, results=results).encode("utf-8", "replace")
    replace_file(target, page)
    return len(page)


def build(folders: Sequence[pathlib.Path], *, results: Sequence[pathlib.Path] = (), follow: str = "") -> str:
    """Returns the report of runs as HTML; there may be no runs if there are `results`.

    `results` are files of `launch.tools.evaluate`, in addition to those in the run folders. Raises ValueError if a
    folder is no run folder, or a file is no results file.
    """
    others = [run_data.read_results(file) for file in results]
    runs = read_runs(folders)
    found = [run_data.of_run(run.folder) for run in runs]
    rows = run_data.rows_of(((run.label, of) for run, (of, _) in zip(runs, found, strict=True)), others)
    drawn = figures.draw(runs)
    sources = drawn.sources
    samples = [read_samples(run.folder) for run in runs]
    histogram = fixed_figures.reward_histogram(runs, samples)
    sections = [(title, list(of)) for title, of in drawn.sections]
    if histogram is not None:
        sections[:1] = [(sections[0][0], [*sections[0][1], histogram])] if sections else [("Rewards", [histogram])]
    models = {one.id: one.model for one in [*drawn.all, *([histogram] if histogram else [])]}
    if runs:
        models["timeline"] = fixed_figures.timeline()
    shown = [shown_samples(of, budget_bytes=BUDGET_BYTES // len(runs)) for of in samples]
    told = [timeline_spans.read_rounds(r, budget_bytes=timeline_spans.BUDGET_BYTES // len(runs)) for r in runs]
    return _render(
        models=models,
        data={
            "kinds": list(KINDS),
            "axes": [dataclasses.asdict(axis) for axis in sources.axes.all],
            "sources": [{"name": name, "updates": num} for name, num in sources.updates_per_point.items()],
            "windows": figures.windows(runs),
            "window": figures.default_window(runs),
            "runs": [
                {"label": visible(run.label), "samples": s.groups, "rounds": t.drawn, "num_rounds": t.num_rounds}
                for run, s, t in zip(runs, shown, told, strict=True)
            ],
        },
        follow=follow,
        title=visible(" and ".join(r.label for r in runs) or "Evaluated models"),
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        runs=[_about(r, s) for r, s in zip(runs, shown, strict=True)],
        colours=figures.COLOURS,
        reward=drawn.reward,
        tables=[
            ("Results", summary.results(runs)),
            ("Cost", summary.costs(runs)),
            ("Diagnostics", summary.diagnostics(runs)),
        ],
        provenance=summary.provenance(runs),
        problems=[
            {"label": visible(run.label), "rows": found, "num": num}
            for run, (found, num) in zip(runs, map(summary.problems, samples), strict=True)
        ],
        sections=sections,
        thinned=[
            f"{label}, {kind} rows: each point of a curve is the mean of {num} rows; for a maximum, their maximum"
            for (label, kind), num in sources.thinned.items()
        ],
        faults=[
            {"label": visible(run.label), "of": t.faults, "times": [_moment(f) for f in t.faults.happened]}
            for run, t in zip(runs, told, strict=True)
        ],
        config=_config_table(runs),
        evaluated=rows,
        num_unreadable_results=sum(num for _, num in found),
    )


def _render(*, models: Mapping[str, Model], data: Mapping[str, Any], follow: str, **values: Any) -> str:
    """Returns the HTML page with figures by id, the script's `data`, and further template values, shown as text.

    `follow` is the version of a served page, which polls for newer ones; empty in a file.
    """
    nonce = secrets.token_urlsafe(16)
    script, drawn = components(dict(models), wrap_script=False) if models else ("", {})
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
        figures={name: Markup(figure) for name, figure in drawn.items()},
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


def _about(run: RunData, shown: ShownSamples) -> Json:
    return {
        "label": visible(run.label),
        "num_shown": shown.num_shown,
        "num_kept": shown.num_kept,
        "num_unreadable": shown.num_unreadable + run.num_unreadable,
    }


def _moment(fault: Fault) -> str:
    first, last = (datetime.datetime.fromtimestamp(t).strftime("%m-%d %H:%M:%S") for t in (fault.time_s, fault.last_s))
    return f"{first} to {last}" if fault.times > 1 else first


def _config_table(runs: Sequence[RunData]) -> Json:
    flat = [_flat(r.config) for r in runs]
    constants = [_flat(r.constants) for r in runs]
    names = sorted({name for f in flat for name in f})
    sections: dict[str, list[tuple[str, list[str], bool]]] = {}
    for name in names:
        values = [f.get(name, "-") for f in flat]
        section, _, field = name.partition(".")
        differs = len(set(values)) > 1 and name != "run.dir"
        sections.setdefault(section if field else "", []).append((field or section, values, differs))
    differing = [
        (f"{section}.{field}" if section else field, values)
        for section, of in sections.items()
        for field, values, differs in of
        if differs
    ]
    effective = [(name, [c.get(name, "-") for c in constants]) for name in sorted({n for c in constants for n in c})]
    return {"sections": sections, "differing": differing, "effective": effective}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else str(value)
            found[visible(f"{prefix}{name}")] = visible(text if len(text) <= 400 else f"{text[:400]}...")
    return found
