"""Builder of the report of one or several runs."""

import dataclasses
import datetime
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.files import replace_file
from configs.extras import install_command
from launch.tools.report import figures, page, run_data, timeline_spans
from launch.tools.report.page import ShownSamples, render, shown_samples
from launch.tools.report.run_data import RunData, column, read_runs
from launch.tools.report.timeline_rounds import Fault
from launch.tools.report.timeline_spans import KINDS
from launch.tools.samples.samples_view import read_samples, visible

Json = dict[str, Any]


def write_report(folders: Sequence[pathlib.Path], target: pathlib.Path, *, results: Sequence[pathlib.Path] = ()) -> int:
    """Writes the report of runs into `target`; returns its size in bytes.

    Raises:
      ValueError: a folder is no run folder, or a file is no results file.
      OSError: the file cannot be written.
    """
    page = build(folders, results=results).encode("utf-8", "replace")
    replace_file(target, page)
    return len(page)


def build(folders: Sequence[pathlib.Path], *, results: Sequence[pathlib.Path] = (), follow: str = "") -> str:
    """Returns the report of runs as HTML.

    Args:
      folders: run folders; may be empty if there are results.
      results: result files of `launch.tools.evaluate`, in addition to those in the run folders.
      follow: as in `render`.

    Raises:
      ValueError: a folder is no run folder, or a file is no results file.
    """
    others = [run_data.read_results(file) for file in results]
    runs = read_runs(folders)
    found = [run_data.of_run(run.folder) for run in runs]
    rows = run_data.rows_of(((run.label, of) for run, (of, _) in zip(runs, found, strict=True)), others)
    sections, sources = figures.draw(runs)
    models = {f"figure-{i}-{j}": d.model for i, (_, of) in enumerate(sections) for j, d in enumerate(of)}
    for name, model in models.items():
        model.name = name
    if runs:
        models["timeline"] = figures.timeline()
    shown = [shown_samples(read_samples(r.folder), budget_bytes=page.BUDGET_BYTES // len(runs)) for r in runs]
    told = [timeline_spans.read_rounds(r, budget_bytes=timeline_spans.BUDGET_BYTES // len(runs)) for r in runs]
    return render(
        models=models,
        data={
            "kinds": list(KINDS),
            "axes": [dataclasses.asdict(axis) for axis in sources.axes.all],
            "sources": sources.names,
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
        numbers=_numbers(runs),
        sections=[
            {
                "title": title,
                "figures": [
                    {"name": f"figure-{i}-{j}", "title": d.panel.title, "note": d.panel.note, "keys": d.keys}
                    for j, d in enumerate(of)
                ],
            }
            for i, (title, of) in enumerate(sections)
        ],
        thinned=[
            f"{label}: a point of the curves over {kind} rows is the mean of {num} (of what is a maximum, the largest)"
            for (label, kind), num in sources.thinned.items()
        ],
        faults=[
            {"label": visible(run.label), "of": t.faults, "times": [_moment(f) for f in t.faults.happened]}
            for run, t in zip(runs, told, strict=True)
        ],
        config=_config_table(runs),
        evaluated=rows,
        num_unreadable_results=sum(num for _, num in found),
        kinds=list(KINDS),
    )


def _about(run: RunData, shown: ShownSamples) -> Json:
    return {
        "label": visible(run.label),
        "folder": visible(str(run.folder)),
        "preset": visible(str(run.config.get("preset", ""))),
        "outcome": visible(str(run.summary.get("outcome", "under way"))),
        "num_shown": shown.num_shown,
        "num_kept": shown.num_kept,
        "num_unreadable": shown.num_unreadable + run.num_unreadable,
    }


def _numbers(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Returns the summary rows (title, value per run); rows without any value are left out."""
    rows: list[tuple[str, list[str]]] = []

    def add(title: str, values: list[str]) -> None:
        if any(v != "-" for v in values):
            rows.append((title, values))

    def of(kind: str, name: str, how: str) -> list[float]:
        return [_of_column(run, kind, name, how) for run in runs]

    add("optimizer steps", [f"{_last_step(r)} of {r.setting('run', 'num_updates', '?')}" for r in runs])
    first, last = of("eval", "eval/reward", "first"), of("eval", "eval/reward", "last")
    errors = [figures.standard_error(r, "eval", "eval/reward") for r in runs]
    add(
        "held-out reward, first",
        [_with_error(v, e[0] if e.size else math.nan) for v, e in zip(first, errors, strict=True)],
    )
    add(
        "held-out reward, last",
        [_with_error(v, e[-1] if e.size else math.nan) for v, e in zip(last, errors, strict=True)],
    )
    add("training reward, last tenth", [_number(v) for v in of("step", "reward/mean", "late")])
    add("response length, last tenth", [_number(v, " tokens") for v in of("step", "response/mean_tokens", "late")])
    add("training time", [_duration(v) for v in of("step", "time/step_s", "sum")])
    add("throughput", [_number(_tokens_per_s(run), " tokens/s") for run in runs])
    add("trainer waiting ratio", [_number(v) for v in of("round", "round/waiting_ratio", "mean")])
    add("lag, mean", [_number(v, " steps") for v in of("step", "lag/mean", "mean")])
    add("lag, oldest token", [_number(v, " steps") for v in of("step", "lag/max", "max")])
    add("effective sample size", [_number(v) for v in of("step", "ess", "mean")])
    add("generation pause per update", [_number(v * 1e3, " ms") for v in of("step", "actor/pause_s", "mean")])
    add("engine against learner, at most", [_number(v, " nats") for v in of("probe", "parity/max_abs_dlogprob", "max")])
    add("groups kept out", [_number(v) for v in of("step", "groups/dropped", "last")])
    return rows


def _tokens_per_s(run: RunData) -> float:
    """Returns trained tokens over training seconds; NaN without an update."""
    rates, seconds = (column(run.of("step"), name) for name in ("tokens_per_s", "time/step_s"))
    known = ~np.isnan(rates * seconds)
    return float((rates * seconds)[known].sum() / seconds[known].sum()) if known.any() else math.nan


def _of_column(run: RunData, kind: str, name: str, how: str) -> float:
    values = column(run.of(kind), name)
    values = values[~(values != values)]
    if not values.size:
        return math.nan
    found = {
        "first": lambda: values[0],
        "last": lambda: values[-1],
        "late": lambda: values[-max(1, values.size // 10) :].mean(),
        "mean": values.mean,
        "max": values.max,
        "sum": values.sum,
    }
    return float(found[how]())


def _last_step(run: RunData) -> int:
    return run.of("step")[-1]["step"] if run.of("step") else 0


def _number(value: float, unit: str = "") -> str:
    if not math.isfinite(value):
        return "-"
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + unit


def _with_error(value: float, error: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3f} ± {error:.3f}" if math.isfinite(error) else f"{value:.3f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.0f} s" if seconds < 120 else str(datetime.timedelta(seconds=int(seconds)))


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
            f"launch.tools.report draws with bokeh, which is not installed: {install_command('report')}"
        ) from e
