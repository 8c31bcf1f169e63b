"""Bokeh figures that are not curves over the run: reward histogram and timeline of a round."""

from collections.abc import Sequence

import numpy as np
from bokeh.models import ColumnDataSource, DataRange1d, FixedTicker, HoverTool, Range1d, Span
from bokeh.plotting import figure
from jaxtyping import Float64

from launch.tools.report.figures import COLOURS, Figure, LegendEntry, empty_figure, name_of
from launch.tools.report.run_data import RunData
from launch.tools.samples.samples_view import Samples, visible

_MAX_BINS = 20
_SHARE = 4
"""Divisor: the histogram compares the first and the last quarter of the updates."""


def reward_histogram(runs: Sequence[RunData], samples: Sequence[Samples]) -> Figure | None:
    """Returns the histogram of stored training rewards in the first and the last quarter of each run's updates.

    None without two different rewards.
    """
    parts: list[tuple[int, int, str, Float64[np.ndarray, " N"]]] = []
    for i, (run, found) in enumerate(zip(runs, samples, strict=True)):
        trained = [group for group in found.groups if group.kind != "eval"]
        last = max((group.step for group in trained), default=0)
        for j, (name, first_step, last_step) in enumerate(
            (("first quarter", 0, last / _SHARE), ("last quarter", last - last / _SHARE, last))
        ):
            within = [g for g in trained if (first_step < g.step or not j) and g.step <= last_step]
            rewards = np.array([r.reward for g in within for r in g.responses], np.float64)
            label = name if len(runs) == 1 else f"{run.label}: {name}"
            parts.append((i, j, visible(label), rewards[np.isfinite(rewards)]))
    parts = [part for part in parts if part[-1].size]
    known = np.concatenate([part[-1] for part in parts]) if parts else np.zeros(0)
    if np.unique(known).size < 2:
        return None
    name = "fig-reward-histogram"
    fig = empty_figure(name, x_axis_label="reward of a response", y_axis_label="fraction of responses")
    fig.xgrid.grid_line_alpha = 0
    fig.y_range = DataRange1d(start=0, only_visible=True)
    edges = np.linspace(known.min(), known.max(), _MAX_BINS + 1)
    keys: list[LegendEntry] = []
    for i, j, label, rewards in parts:
        counts, _ = np.histogram(rewards, edges)
        bars = {"from": edges[:-1], "to": edges[1:], "fraction": counts / rewards.size, "responses": counts}
        colour = COLOURS[(j if len(runs) == 1 else i) % len(COLOURS)]
        glyph = fig.quad(
            "from",
            "to",
            "fraction",
            0,
            source=ColumnDataSource(bars),
            name=name_of(i, j),
            color=colour,
            fill_alpha=0.1 + 0.25 * j,
            line_width=1.5,
        )
        glyph.tags = ["bars", "fraction", label, False]
        tooltips = [("", label.replace("{", "(").replace("}", ")")), ("reward", "@from to @to")]
        tooltips += [("fraction", "@fraction{0.000}"), ("responses", "@responses")]
        fig.add_tools(HoverTool(renderers=[glyph], tooltips=tooltips, visible=False))
        keys.append(LegendEntry(label, colour, "solid", str(i), str(j)))
    note = (
        "Responses in samples.jsonl, by quarters of the updates. Large groups store only some responses, with the best "
        "and the worst."
    )
    return Figure(name, "Reward histogram", note, fig, keys, has_log=False)


def timeline() -> figure:
    """Returns the timeline of a round, which the page's script fills."""
    fig = empty_figure(
        "timeline",
        height=300,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=1, end=0),
        x_axis_label="seconds since the first ticket of the round",
    )
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
        (bars, [("", "@text"), ("duration", "@seconds{0.000} s"), ("start", "@left{0.000} s")]),
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
