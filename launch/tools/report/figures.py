"""Bokeh figures of the report."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    Band,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    FixedTicker,
    GlyphRenderer,
    HoverTool,
    Model,
    Range1d,
    Span,
    TeeHead,
    Whisker,
)
from bokeh.plotting import figure
from jaxtyping import Float64

from launch.tools.report.panels import EVALUATION, REWARD, SECTIONS, STEP, Axes, Line, Panel, Section, expand, of_set
from launch.tools.report.run_data import RunData, bins, column, downsample, metric_names, running_mean
from launch.tools.samples.samples_view import visible

COLOURS = ("#3b82c4", "#d9772b", "#2f9e6e", "#b45fa8", "#c0973a", "#d1495b", "#5f7fa8", "#7c7c7c")
"""Colors that are visible on white and dark gray, and distinguishable with most color-vision deficiencies."""
_DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
HEIGHT = 250
_MIN_SMOOTHED = 20
"""Minimum updates for a running mean over the curve."""
_MAX_DOTTED = 40
"""Maximum points of a curve drawn with markers."""


@dataclasses.dataclass(frozen=True)
class LegendEntry:
    """A legend entry, which hides and shows its glyphs."""

    label: str
    colour: str
    """Color; empty means the text color, if colors distinguish runs."""
    dash: str
    run: str
    """Run whose glyphs it controls, as in `name_of`; empty means all. `line` selects the metric."""
    line: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure with its note, and its legend, which is part of the page because it may be wider than the figure."""

    panel: Panel
    model: Model
    keys: list[LegendEntry]


def name_of(run: int, line: int) -> str:
    """Returns the name of all glyphs of a run's metric, by which a legend entry finds them."""
    return f"{run}/{line}"


class Sources:
    """Bokeh column sources of each run; rows of one kind share a source, so each number is stored once.

    Curves are drawn over the column `x`, a copy of one axis that the page's script replaces.
    """

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.axes = Axes(runs)
        self._made: dict[tuple[str, str], ColumnDataSource] = {}
        self.thinned: dict[tuple[str, str], int] = {}
        """Rows per point by (run, kind), if more than one."""

    def of(self, run: RunData, kind: str) -> ColumnDataSource:
        """Returns the source of a run's rows of a kind, with their positions on each axis."""
        key = (run.label, kind)
        if key not in self._made:
            steps = column(run.of(kind), "step")
            starts = bins(steps.size)
            if starts.size < steps.size:
                self.thinned[key] = int(starts[1])
            at = {name: _small(downsample(v, starts)) for name, v in self.axes.columns(run, kind).items()}
            self._made[key] = ColumnDataSource(at | {"x": at[STEP]}, name=f"rows-{len(self._made)}")
        return self._made[key]

    @property
    def names(self) -> list[str]:
        """Source names, by which the page's script finds them."""
        return [source.name for source in self._made.values() if source.name]

    def metric(self, run: RunData, kind: str, name: str) -> tuple[ColumnDataSource, str]:
        """Returns the source that contains a metric, and the name of its column."""
        source = self.of(run, kind)
        if name not in source.column_names:
            values = column(run.of(kind), name)
            is_largest = name.rpartition("/")[2].startswith("max") and not name.startswith("rewards/")
            source.add(_small(downsample(values, bins(values.size), largest=is_largest)), name)
        return source, name

    def put(self, run: RunData, kind: str, **columns: Float64[np.ndarray, " N"]) -> ColumnDataSource:
        """Returns the source with added columns, which are computed per row and downsampled here."""
        source = self.of(run, kind)
        for name, values in columns.items():
            source.add(_small(downsample(values, bins(values.size))), name)
        return source


def draw(runs: Sequence[RunData]) -> tuple[list[tuple[str, list[Figure]]], Sources]:
    """Returns the non-empty figures by section title, and their sources."""
    sources = Sources(runs)
    width = sources.axes.all[0].largest
    over = Range1d(name="over", start=-0.01 * width, end=1.01 * width, bounds=(-0.05 * width, 1.05 * width))
    drawn: list[tuple[str, list[Figure]]] = []
    for section in SECTIONS:
        found = [_draw(panel, runs, sources, over) for panel in _panels(section, runs)]
        if found := [d for d in found if d is not None]:
            drawn.append((section.title, found))
    return drawn, sources


def _panels(section: Section, runs: Sequence[RunData]) -> list[Panel]:
    panels: list[Panel] = []
    for panel in section.panels:
        panels.append(panel)
        if panel is EVALUATION:
            kinds = sorted({kind for run in runs for kind in run.eval_kinds})
            panels += [of_set(kind, sorted({n for r in runs for n in metric_names(r.of(kind))})) for kind in kinds]
    return panels


def _draw(panel: Panel, runs: Sequence[RunData], sources: Sources, over: Range1d) -> Figure | None:
    lines = expand(panel, sorted({n for r in runs for n in metric_names(r.of(panel.kind))}))
    lines = [line for line in lines if any(_says(run, panel, line) for run in runs)]
    if not lines:
        return None
    fig = _empty(panel, over)
    hovered, keys = [], []
    is_alone = len(runs) == 1
    for i, run in enumerate(runs):
        there = [j for j, line in enumerate(lines) if _says(run, panel, line, zero=True)]
        for j in there:
            colour = COLOURS[(j if is_alone else i) % len(COLOURS)]
            dash = "solid" if is_alone else _DASHES[j % len(_DASHES)]
            look = _Look(colour=colour, dash=dash, name=name_of(i, j))
            label = lines[j].label if is_alone else f"{run.label}: {lines[j].label}"
            glyph, metric = _add(fig, panel, run, lines[j], sources, look)
            hovered.append((glyph, metric, visible(label)))
            if is_alone:
                keys.append(LegendEntry(visible(lines[j].label), colour, dash, "", str(j)))
        if there and not is_alone:
            keys.append(LegendEntry(visible(run.label), COLOURS[i % len(COLOURS)], "solid", str(i), ""))
    if not is_alone and len(lines) > 1:
        keys += [
            LegendEntry(visible(one.label), "", _DASHES[j % len(_DASHES)], "", str(j)) for j, one in enumerate(lines)
        ]
    _add_hover(fig, hovered)
    panel = _cut_off(fig, panel, [(r, column(r.of(panel.kind), one.metric)) for r in runs for one in lines])
    return Figure(panel, fig, keys if len(keys) > 1 else [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Look:
    colour: str
    dash: str
    name: str


def _empty(panel: Panel, over: Range1d) -> figure:
    fig = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="xbox_zoom,xpan,reset,save",
        active_drag="xbox_zoom",
        x_range=over,
        x_axis_label="optimizer step",
        y_axis_label=panel.y_label,
        y_axis_type="log" if panel.is_log else "linear",
        background_fill_alpha=0,
        border_fill_alpha=0,
        output_backend="canvas",
    )
    fig.toolbar.logo = None
    fig.toolbar.autohide = True
    fig.min_border_right = 12
    fig.outline_line_alpha = 0
    fig.xgrid.grid_line_alpha = 0
    fig.y_range = DataRange1d(only_visible=True)
    return fig


def _add(
    fig: figure, panel: Panel, run: RunData, line: Line, sources: Sources, look: _Look
) -> tuple[GlyphRenderer, str]:
    """Draws a metric of a run; returns the glyph and column for the hover tool."""
    source, metric = sources.metric(run, panel.kind, line.metric)
    values = column(run.of(panel.kind), line.metric)
    width = 1.8
    if panel.kind == "step" and values.size >= _MIN_SMOOTHED:
        fig.line("x", metric, source=source, color=look.colour, alpha=0.3, line_width=1, name=look.name)
        mean, error = running_mean(values, width=max(run.updates_per_round, 5, values.size // 25))
        metric, width = f"{metric} smooth", 2.2
        sources.put(run, panel.kind, **{metric: mean})
        if panel is REWARD:
            sources.put(run, panel.kind, _low=mean - error, _high=mean + error)
            band = Band(base="x", lower="_low", upper="_high", source=source, fill_color=look.colour, name=look.name)
            band.fill_alpha, band.line_alpha = 0.18, 0
            fig.add_layout(band)
    glyph = fig.line("x", metric, source=source, color=look.colour, line_dash=look.dash, name=look.name)
    glyph.glyph.line_width = width
    if panel.kind.startswith("eval") or values.size <= _MAX_DOTTED:
        fig.scatter("x", metric, source=source, color=look.colour, size=5, name=look.name)
    if panel.kind.startswith("eval"):
        _add_errors(fig, panel, run, metric, sources, look)
    return glyph, metric


def _cut_off(fig: figure, panel: Panel, drawn: Sequence[tuple[RunData, Float64[np.ndarray, " N"]]]) -> Panel:
    """Clips a few very large values that would flatten the curve, and adds a note to the panel."""
    known = [(r, v) for r, v in drawn if np.isfinite(v).any()]
    if not panel.unit or not known:
        return panel
    usual = 1.25 * max(float(np.nanpercentile(v, 97)) for _, v in known)
    run, values = max(known, key=lambda one: float(np.nanmax(one[1])))
    largest = int(np.nanargmax(values))
    if not 0 < 3 * usual < values[largest]:
        return panel
    fig.y_range = Range1d(start=0, end=usual)
    step = run.of(panel.kind)[largest]["step"]
    said = f"Up to {values[largest]:.3g} {panel.unit} (update {step}): the largest few per cent may lie above."
    return dataclasses.replace(panel, note=f"{panel.note} {said}".strip())


def _add_errors(fig: figure, panel: Panel, run: RunData, metric: str, sources: Sources, look: _Look) -> None:
    values, error = column(run.of(panel.kind), metric), standard_error(run, panel.kind, metric)
    low, high = f"{metric} low", f"{metric} high"
    source = sources.put(run, panel.kind, **{low: values - error, high: values + error})
    head = {"size": 6, "line_color": look.colour}
    whisker = Whisker(
        base="x",
        lower=low,
        upper=high,
        source=source,
        line_color=look.colour,
        name=look.name,
        lower_head=TeeHead(**head),
        upper_head=TeeHead(**head),
    )
    whisker.level = "underlay"
    fig.add_layout(whisker)
    # Range the axis over the errors as well, because it follows only glyphs.
    fig.scatter("x", low, source=source, alpha=0, size=1)
    fig.scatter("x", high, source=source, alpha=0, size=1)


def timeline() -> figure:
    """Returns the figure of a round, which the page's script fills."""
    fig = figure(
        name="timeline",
        height=300,
        sizing_mode="stretch_width",
        tools="xbox_zoom,xpan,reset,save",
        active_drag="xbox_zoom",
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=1, end=0),
        x_axis_label="seconds since the round's first ticket",
        background_fill_alpha=0,
        border_fill_alpha=0,
    )
    fig.toolbar.logo = None
    fig.toolbar.autohide = True
    fig.outline_line_alpha = 0
    fig.ygrid.grid_line_alpha = 0
    fig.yaxis.ticker = FixedTicker(ticks=[])
    fig.min_border_left = 90  # process names
    names = ("left", "right", "top", "bottom")
    tracks = ColumnDataSource({n: [] for n in names}, name="timeline-tracks")
    spans = ColumnDataSource({n: [] for n in (*names, "text", "seconds", "colour", "alpha")}, name="timeline-spans")
    marks = ColumnDataSource({n: [] for n in ("x", "y", "text")}, name="timeline-marks")
    fig.quad(*names, source=tracks, fill_color="#8a94a0", fill_alpha=0.14, line_alpha=0)
    bars = fig.quad(*names, source=spans, fill_color="colour", fill_alpha="alpha", line_alpha=0)
    points = fig.scatter("x", "y", source=marks, marker="diamond", size=13, color="#d1495b", line_color="white")
    for renderer, tooltips in (
        (bars, [("", "@text"), ("seconds", "@seconds{0.000} from @left{0.000}")]),
        (points, [("", "@text")]),
    ):
        fig.add_tools(HoverTool(renderers=[renderer], tooltips=tooltips, visible=False))
    fig.add_layout(
        Span(
            name="timeline-dispatch",
            dimension="height",
            location=0,
            line_color="#176043",
            line_dash="dashed",
            visible=False,
        )
    )
    return fig


def standard_error(run: RunData, kind: str, metric: str) -> Float64[np.ndarray, " N"]:
    """Returns the standard error of an evaluation's mean: from the rows, else the bound sqrt(m (1 - m) / n).

    Among distributions on [0, 1] with mean m, one on {0, 1} has the largest variance. NaN if neither is known.
    """
    rows = run.of(kind)
    known = column(rows, f"{metric}_stderr")
    mean, num = column(rows, metric), column(rows, "problems")
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = np.where((mean >= 0) & (mean <= 1), np.sqrt(mean * (1 - mean) / num), np.nan)
    rewards = np.concatenate([column(run.of("step"), name) for name in ("reward/min", "reward/max")])
    rewards = rewards[~np.isnan(rewards)]
    in_unit = bool(((rewards >= -1e-9) & (rewards <= 1 + 1e-9)).all())
    return np.where(np.isfinite(known) | (not in_unit), known, bound)


def _add_hover(fig: figure, hovered: Sequence[tuple[GlyphRenderer, str, str]]) -> None:
    for glyph, metric, name in hovered:
        fig.add_tools(
            HoverTool(
                renderers=[glyph],
                mode="vline",
                tooltips=[("step", "@step{0}"), (name.replace("{", "(").replace("}", ")"), f"@{{{metric}}}{{%.4g}}")],
                formatters={f"@{{{metric}}}": "printf"},
                attachment="horizontal",
                visible=False,
            )
        )
    fig.add_tools(CrosshairTool(dimensions="height", line_alpha=0.35, visible=False))


def _says(run: RunData, panel: Panel, line: Line, *, zero: bool = False) -> bool:
    """Returns True if a run has a value of a metric, other than 0 unless `zero`."""
    values = column(run.of(panel.kind), line.metric)
    values = values[np.isfinite(values)]
    if panel.is_log:
        return bool((values > 0).any())
    return values.size > 0 and (zero or panel.kind.startswith("eval") or panel is REWARD or bool(np.any(values != 0)))


def _small(values: Float64[np.ndarray, " N"]) -> Any:
    """Converts to float32, which halves the size and exceeds a figure's precision; infinite values become NaN.

    The return type is Any, because bokeh's types do not include arrays.
    """
    limit = float(np.finfo(np.float32).max)
    return np.where(np.abs(values) < limit, values, math.nan).astype(np.float32)
