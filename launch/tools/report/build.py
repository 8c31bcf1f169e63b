"""Builder of the report of one or several runs."""

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.files import replace_file
from configs.suggestions import install_command
from launch.tools.report import figures, fixed_figures, page, run_data, summary, timeline_spans
from launch.tools.report.page import ShownSamples, render, shown_samples
from launch.tools.report.run_data import RunData, read_runs
from launch.tools.report.timeline_rounds import Fault
from launch.tools.report.timeline_spans import KINDS
from launch.tools.samples.samples_view import read_samples, visible

Json = dict[str, Any]


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
    shown = [shown_samples(of, budget_bytes=page.BUDGET_BYTES // len(runs)) for of in samples]
    told = [timeline_spans.read_rounds(r, budget_bytes=timeline_spans.BUDGET_BYTES // len(runs)) for r in runs]
    return render(
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


def check_library() -> None:
    """Raises ValueError if bokeh, which draws the figures, is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError as e:
        raise ValueError(
            f"launch.tools.report: expected bokeh, which is not installed. Install it: {install_command('report')}"
        ) from e
