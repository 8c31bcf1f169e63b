"""Bokeh figures of the report: curves over the steps of runs."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    Band,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    GlyphRenderer,
    HoverTool,
    Range1d,
    SaveTool,
    TeeHead,
    Whisker,
)
from bokeh.plotting import figure
from jaxtyping import Float64

from launch.tools.report.panels import LOSS, REWARD, SCORES, SECTIONS, STEP, Axes, Line, Panel, expand, of_set
from launch.tools.report.run_data import POSITION, RunData, bins, column, downsample, metric_names
from launch.tools.samples.samples_view import visible

COLOURS = ("#3b82c4", "#d9772b", "#2f9e6e", "#b45fa8", "#c0973a", "#d1495b", "#5f7fa8", "#7c7c7c")
"""Colors that are visible on white and dark gray, and distinguishable with most color-vision deficiencies."""
_DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
HEIGHT, REWARD_HEIGHT = 250, 330
MEAN = " mean"
"""Suffix of the column with the running mean of a metric, which the page's script computes."""
_MIN_SMOOTHED = 20
"""Minimum updates for a running mean over the curve."""
_MAX_DOTTED = 40
"""Maximum points of a curve drawn with markers."""
_ROUNDS = (1, 2, 5)
"""Running-mean windows in rounds: these times powers of ten."""


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

    id: str
    """Name of the model and of the page's element, to which a link may point."""
    title: str
    note: str
    model: figure
    keys: list[LegendEntry]
    is_log: bool = False
    has_log: bool = True
    """True if the y axis may be logarithmic."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """All curves of a report."""

    reward: Figure | None
    """Curve at the top of the page: of the reward, or of the loss."""
    sections: list[tuple[str, list[Figure]]]
    """Non-empty figures by section title."""
    sources: "Sources"

    @property
    def all(self) -> list[Figure]:
        """All figures in the order of the page."""
        return [one for one in (self.reward, *(one for _, of in self.sections for one in of)) if one is not None]


def name_of(run: int, line: int) -> str:
    """Returns the name of all glyphs of a run's metric, by which a legend entry finds them."""
    return f"{run}/{line}"


class Sources:
    """Bokeh column sources of each run; rows of one kind share one, whose `x` the page's script sets to an axis."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.axes = Axes(runs)
        self._made: dict[tuple[str, str], ColumnDataSource] = {}
        self._updates: dict[tuple[str, str], int] = {}
        self.thinned: dict[tuple[str, str], int] = {}
        """Rows per point by (run, kind), if more than one."""

    def of(self, run: RunData, kind: str) -> ColumnDataSource:
        """Returns the source of a run's rows of a kind, with their positions on each axis."""
        key = (run.label, kind)
        if key not in self._made:
            steps = column(run.of(kind), "step")
            self._updates[key] = run.updates_of(kind)
            starts = bins(steps.size)
            if starts.size < steps.size:
                self.thinned[key] = int(starts[1])
            at = {name: _small(downsample(v, starts)) for name, v in self.axes.columns(run, kind).items()}
            self._made[key] = ColumnDataSource(at | {"x": at[STEP]}, name=f"rows-{len(self._made)}")
        return self._made[key]

    @property
    def updates_per_point(self) -> dict[str, int]:
        """Updates per point of a source by its name, by which the page's script finds it; 0 if it is not smoothed."""
        return {str(s.name): self.thinned.get(key, 1) * self._updates[key] for key, s in self._made.items()}

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


def draw(runs: Sequence[RunData]) -> Figures:
    """Returns the curves of runs."""
    sources = Sources(runs)
    width = sources.axes.all[0].largest
    over = Range1d(name="over", start=-0.01 * width, end=1.01 * width, bounds=(-0.05 * width, 1.05 * width))
    names = metric_names(runs)
    ids: set[str] = set()
    top = REWARD if expand(REWARD, names) else LOSS
    first = _draw(top, runs, names, sources, over, ids)
    drawn: list[tuple[str, list[Figure]]] = []
    for title, panels in SECTIONS.items():
        others = [panel for panel in _with_sets(panels, runs, names) if panel is not top]
        found = [_draw(panel, runs, names, sources, over, ids) for panel in others]
        if found := [d for d in found if d is not None]:
            drawn.append((title, found))
    return Figures(first, drawn, sources)


def windows(runs: Sequence[RunData]) -> list[int]:
    """Returns the running-mean windows to choose from, in updates: 1 (none), and numbers of whole rounds.

    A window of whole rounds weights each update of a round equally. With two updates per round, the mean of an odd
    number of updates would alternate with the lag.
    """
    longest = max((len(run.of("step")) for run in runs), default=0)
    per_round = max((run.updates_per_round for run in runs), default=1)
    found = {1}
    if longest >= _MIN_SMOOTHED:
        powers = range(len(str(longest)))
        found |= {w for p in powers for n in _ROUNDS if (w := n * 10**p * per_round) <= longest // 2}
    return sorted(found)


def default_window(runs: Sequence[RunData]) -> int:
    """Returns the smallest window over at least a 25th of the longest run."""
    found = windows(runs)
    longest = max((len(run.of("step")) for run in runs), default=0)
    return next((w for w in found if 25 * w >= longest), found[-1]) if len(found) > 1 else 1


def figure_id(title: str, taken: set[str]) -> str:
    """Returns an unused id of a figure for links, and adds it to `taken`."""
    base = name = "fig-" + (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "figure")
    number = 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _with_sets(panels: Sequence[Panel], runs: Sequence[RunData], names: dict[str, set[str]]) -> list[Panel]:
    of_sets = [of_set(kind, names) for kind in sorted({kind for run in runs for kind in run.eval_kinds})]
    return [shown for panel in panels for shown in (panel, *(of_sets if panel is SCORES else ()))]


def _draw(
    panel: Panel,
    runs: Sequence[RunData],
    names: dict[str, set[str]],
    sources: Sources,
    over: Range1d,
    ids: set[str],
) -> Figure | None:
    lines = expand(panel, names)
    lines = [line for line in lines if any(_has_values(run, panel, line) for run in runs)]
    if not lines:
        return None
    name = figure_id(panel.title, ids)
    fig = empty_figure(
        name,
        height=REWARD_HEIGHT if panel is REWARD else HEIGHT,
        x_range=over,
        x_axis_label="optimizer step",
        y_axis_label=panel.y_label,
        y_axis_type="log" if panel.is_log else "linear",
    )
    fig.min_border_right = 12
    fig.xgrid.grid_line_alpha = 0
    fig.y_range = DataRange1d(only_visible=True)
    hovered, keys = [], []
    is_alone = len(runs) == 1
    for i, run in enumerate(runs):
        there = [j for j, line in enumerate(lines) if _has_values(run, panel, line, zero=True)]
        for j in there:
            colour = COLOURS[(j if is_alone else i) % len(COLOURS)]
            dash = "solid" if is_alone else _DASHES[j % len(_DASHES)]
            look = _Look(colour=colour, dash=dash, name=name_of(i, j))
            label = visible(lines[j].label if is_alone else f"{run.label}: {lines[j].label}")
            hovered.append((*_add(fig, panel, run, lines[j], sources, look, label), label))
            if is_alone:
                keys.append(LegendEntry(visible(lines[j].label), colour, dash, "", str(j)))
        if there and not is_alone:
            keys.append(LegendEntry(visible(run.label), COLOURS[i % len(COLOURS)], "solid", str(i), ""))
    if not is_alone and len(lines) > 1:
        keys += [
            LegendEntry(visible(one.label), "", _DASHES[j % len(_DASHES)], "", str(j)) for j, one in enumerate(lines)
        ]
    _add_hover(fig, hovered, sources.axes)
    note = _clip(fig, panel, [(r, line, column(r.of(line.kind), line.metric)) for r in runs for line in lines])
    return Figure(name, visible(panel.title), note, fig, keys if len(keys) > 1 else [], panel.is_log)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Look:
    colour: str
    dash: str
    name: str


def empty_figure(name: str, *, height: int = HEIGHT, x_range: Range1d | None = None, **options: Any) -> figure:
    """Returns a figure without glyphs whose id in the page is `name`; `options` are those of bokeh's figure."""
    fig = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools="xbox_zoom,xpan,reset",
        active_drag="xbox_zoom",
        output_backend="canvas",
        background_fill_alpha=0,  # the page's script sets both to the page's color
        border_fill_alpha=0,
        **({} if x_range is None else {"x_range": x_range}),
        **options,
    )
    fig.add_tools(SaveTool(filename=name.removeprefix("fig-")))
    fig.toolbar.logo = None
    fig.toolbar.autohide = True
    fig.outline_line_alpha = 0
    return fig


def _add(
    fig: figure, panel: Panel, run: RunData, line: Line, sources: Sources, look: _Look, label: str
) -> tuple[GlyphRenderer, str]:
    """Draws a metric of a run; returns the glyph and column for the hover tool. The page's script reads the tags."""
    source, metric = sources.metric(run, line.kind, line.metric)
    values = column(run.of(line.kind), line.metric)
    is_smoothed = run.updates_of(line.kind) > 0 and values.size * run.updates_of(line.kind) >= _MIN_SMOOTHED
    if is_smoothed:
        faint = fig.line("x", metric, source=source, color=look.colour, alpha=0.3, line_width=1, name=look.name)
        faint.tags = ["faint"]
        if panel is REWARD:
            low, high = (f"{metric}{MEAN} {end}" for end in ("low", "high"))
            sources.put(run, line.kind, **dict.fromkeys((low, high), values))
            band = Band(base="x", lower=low, upper=high, source=source, fill_color=look.colour, name=look.name)
            band.fill_alpha, band.line_alpha = 0.18, 0
            fig.add_layout(band)
    glyph = fig.line("x", metric, source=source, color=look.colour, line_dash=look.dash, name=look.name)
    glyph.glyph.line_width = 2.2 if is_smoothed else 1.8
    glyph.tags = ["curve", metric, label, is_smoothed]
    if line.kind.startswith("eval") or values.size <= _MAX_DOTTED:
        fig.scatter("x", metric, source=source, color=look.colour, size=5, name=look.name)
    if line.kind.startswith("eval"):
        _add_errors(fig, line, run, sources, look)
    return glyph, metric


def _clip(fig: figure, panel: Panel, drawn: Sequence[tuple[RunData, Line, Float64[np.ndarray, " N"]]]) -> str:
    """Clips a few very large values that would flatten the curve; returns the panel's note, which mentions them."""
    known = [one for one in drawn if np.isfinite(one[2]).any()]
    if not panel.unit or not known:
        return panel.note
    usual = 1.25 * max(float(np.nanpercentile(v, 97)) for _, _, v in known)
    run, line, values = max(known, key=lambda one: float(np.nanmax(one[2])))
    largest = int(np.nanargmax(values))
    if not 0 < 3 * usual < values[largest]:
        return panel.note
    fig.y_range = Range1d(start=0, end=usual)
    step = run.of(line.kind)[largest]["step"]
    clipped = f"The largest values are outside the axis: at most {values[largest]:.3g} {panel.unit} (step {step})."
    return f"{panel.note} {clipped}".strip()


def _add_errors(fig: figure, line: Line, run: RunData, sources: Sources, look: _Look) -> None:
    metric = line.metric
    values, error = column(run.of(line.kind), metric), standard_error(run, line.kind, metric)
    low, high = f"{metric} low", f"{metric} high"
    source = sources.put(run, line.kind, **{low: values - error, high: values + error})
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


def standard_error(run: RunData, kind: str, metric: str) -> Float64[np.ndarray, " N"]:
    """Returns the standard error of an evaluation's mean: from the rows, else the bound sqrt(m (1 - m) / n).

    Among distributions on [0, 1] with mean m, one on {0, 1} has the largest variance. NaN if neither is known, and for
    losses, which have no such bound.
    """
    rows = run.of(kind)
    known = column(rows, f"{metric}_stderr")
    mean, num = column(rows, metric), column(rows, "problems")
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = np.where((mean >= 0) & (mean <= 1), np.sqrt(mean * (1 - mean) / num), np.nan)
    rewards = np.concatenate([column(run.of("step"), name) for name in ("reward/min", "reward/max")])
    rewards = rewards[~np.isnan(rewards)]
    in_unit = bool(((rewards >= -1e-9) & (rewards <= 1 + 1e-9)).all())
    return np.where(np.isfinite(known) | (not in_unit or metric.endswith("loss")), known, bound)


def _add_hover(fig: figure, hovered: Sequence[tuple[GlyphRenderer, str, str]], axes: Axes) -> None:
    for glyph, metric, name in hovered:
        columns = [(name, metric)] + [("running mean", f"{metric}{MEAN}")] * bool(glyph.tags[-1])
        fields = [(title.replace("{", "(").replace("}", ")"), f"@{{{of}}}{{%.4g}}") for title, of in columns]
        cost = [(axis.label, f"@{axis.name}{{0,0.[0]}}") for axis in axes.all]
        fig.add_tools(
            HoverTool(
                renderers=[glyph],
                mode="vline",
                tooltips=fields + cost,
                formatters={f"@{{{of}}}": "printf" for _, of in columns},
                attachment="horizontal",
                visible=False,
            )
        )
    fig.add_tools(CrosshairTool(dimensions="height", line_alpha=0.35, visible=False))


def _has_values(run: RunData, panel: Panel, line: Line, *, zero: bool = False) -> bool:
    """Returns True if a run has a value of a metric, other than 0 unless `zero`."""
    values = column(run.of(line.kind), line.metric)
    values = values[np.isfinite(values)]
    if panel.is_log:
        return bool((values > 0).any())
    is_shown = zero or panel is REWARD or line.kind.startswith(("eval", POSITION))
    return values.size > 0 and (is_shown or bool(np.any(values != 0)))


def _small(values: Float64[np.ndarray, " N"]) -> Any:
    """Converts to float32, which halves the size; infinite values become NaN. Bokeh's types do not include arrays."""
    limit = float(np.finfo(np.float32).max)
    return np.where(np.abs(values) < limit, values, math.nan).astype(np.float32)
