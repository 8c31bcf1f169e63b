"""Figures of the benches: bar charts side by side, and curves of rewards."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")


def bars(file: pathlib.Path, names: Sequence[str], panels: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Writes a PNG with a panel for each quantity: a bar with its error for each name.

    Names that differ in their numbers only have one color.
    """
    plt = pyplot()
    kinds = [re.sub(r"\d+", "", name) for name in names]
    color_of = dict(zip(dict.fromkeys(kinds), itertools.cycle(COLORS), strict=False))
    size = (4 * len(panels) + 2, 1 + 0.22 * len(names))
    fig, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, (title, stats) in zip(axes[0], panels.items(), strict=True):
        colors = [color_of[kind] for kind in kinds]
        axis.barh(range(len(names)), [m for m, _ in stats], xerr=[s for _, s in stats], color=colors, capsize=2)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_title(title, fontsize=10)
    axes[0][0].invert_yaxis()
    fig.savefig(file, dpi=130)
    plt.close(fig)


def curves(file: pathlib.Path, lines: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> None:
    """Writes a PNG of held-out reward by optimizer step: a color per name, a line per seed."""
    plt = pyplot()
    fig, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for color, (name, seeds) in zip(COLORS, lines.items(), strict=False):
        for index, points in enumerate(seeds):
            label = f"{name}, {len(seeds)} seeds" if index == 0 else None
            axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.4, label=label)
    axis.set(xlabel="optimizer step", ylabel="held-out reward", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False)
    fig.savefig(file, dpi=130)
    plt.close(fig)


@dataclasses.dataclass(frozen=True)
class Point:
    """A number with its 95% interval and its aim."""

    name: str
    value: float
    interval: Sequence[float] | None
    aim: float
    is_met: bool


def points(file: pathlib.Path, panels: Mapping[str, Sequence[Point]]) -> None:
    """Writes a PNG with a panel for each unit, below each other: numbers with intervals, and a bar at each aim."""
    plt = pyplot()
    rows = [len(panel) for panel in panels.values()]
    size = (9.6, 0.34 * sum(rows) + 0.75 * len(rows))
    fig, axes = plt.subplots(len(rows), 1, figsize=size, layout="constrained", squeeze=False, height_ratios=rows)
    for axis, (unit, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for y, point in enumerate(panel):
            low, high = point.interval or (point.value, point.value)
            axis.plot([low, high], [y, y], color=COLORS[2 if point.is_met else 3], linewidth=2)
            axis.plot(point.value, y, "o", color=COLORS[2 if point.is_met else 3])
            axis.plot(point.aim, y, "|", color="black", markersize=13, markeredgewidth=2)
        axis.set_yticks(range(len(panel)), [point.name for point in panel], fontsize=8)
        axis.set_ylim(len(panel) - 0.5, -0.5)
        axis.set_title(f"{unit} (black: aim; green: met; red: not met)", fontsize=9, loc="left")
        axis.grid(axis="x", alpha=0.3)
    fig.savefig(file, dpi=110)
    plt.close(fig)


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
