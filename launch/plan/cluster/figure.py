"""Draws which part gives out first: a panel a variant, engines across, learner chips up, response tokens/s as lines."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launch.plan.cluster.part import Part
from launch.plan.cluster.scale import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {
    "learner compute": "#9ecae1",
    "generation": "#c7e9c0",
    "store: groups": "#fdae6b",
    "store: groups' bytes": "#e6550d",
    "store: claims": "#d94801",
    "store: signs of life": "#a63603",
    "store: looks": "#fee6ce",
    "store: telling of changes": "#ffd92f",
    "store's link": "#fdd0a2",
    "store's connections": "#969696",
    "learner hosts' writing": "#dadaeb",
    "learner hosts' links": "#9e9ac8",
    "actor hosts' links": "#756bb1",
    "weights' bucket": "#54278f",
    "snapshot servers' connections": "#d9d9d9",
    "leading host's link": "#fa9fb5",
}
"""Blue and green are what one pays for; orange is the store, violet the weights, grey what has a fixed number."""
_NEVER = "///"
_LEAST_LABELLED = 0.012
"""Of a panel's cells: a smaller region is only in the legend."""


def plot_scale(panels: Mapping[str, Sequence[Sequence[Cell]]], path: str | os.PathLike[str]) -> None:
    """Writes a PNG.

    Args:
      panels: by title, rows of cells as `scale` gives them.
      path: of the PNG.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an extra: everything but the plot works without it
        from matplotlib.patches import Patch
    except ImportError as e:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from e
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.9 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    names: set[str] = set()
    for ax, (title, cells) in zip(axes, panels.items(), strict=False):
        names |= _draw(ax, title, cells)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    known = [name for name in COLOURS if name in names]
    figure.legend(
        handles=[
            *(Patch(facecolor=COLOURS[n], edgecolor="black", lw=0.5, label=n) for n in known),
            Patch(facecolor="white", edgecolor="black", lw=0.5, hatch=_NEVER, label="hatched: at any pace"),
        ],
        loc="outside lower center",
        ncols=min(4, 1 + len(known)),
        title="gives out first; black lines: response tokens trained a second up to there",
    )
    figure.savefig(path, dpi=130)


def name_in_figure(part: Part) -> str:
    """The store is several, by what takes most of its time."""
    return part.full_name if part.name == "store" else part.name


def _draw(ax: "Axes", title: str, cells: Sequence[Sequence[Cell]]) -> set[str]:
    """One panel; returns the names of the parts that it shows."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    engines = np.array([c.num_engines for c in cells[0]], float)
    chips = np.array([row[0].num_learner_chips for row in cells], float)
    parts = list(COLOURS)
    which = np.array([[parts.index(name_in_figure(c.limit.part)) for c in row] for row in cells])
    colours = ListedColormap(list(COLOURS.values()))
    ax.pcolormesh(_edges(engines), _edges(chips), which, cmap=colours, vmin=-0.5, vmax=len(parts) - 0.5)
    rates = np.array([[c.tokens_per_s for c in row] for row in cells])
    if rates.max() > 0 and min(which.shape) > 1:
        low, high = np.floor(np.log10(rates[rates > 0].min())), np.ceil(np.log10(rates.max()))
        levels = 10.0 ** np.arange(low, high + 0.5, 0.5)
        runs = np.ma.masked_less_equal(rates, 0.0)
        lines = ax.contour(engines, chips, runs, levels=levels, colors="black", linewidths=0.7)
        ax.clabel(lines, levels=levels[::2], fmt=_rate, fontsize=8)
    if (rates <= 0).any() and min(which.shape) > 1:
        ax.contourf(engines, chips, rates <= 0, levels=[0.5, 1.5], colors="none", hatches=[_NEVER])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="engines", ylabel="learner chips", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    for number in np.unique(which):
        where = which == number
        if where.mean() >= _LEAST_LABELLED:
            _label(ax, parts[number], where, engines, chips)
    return {parts[number] for number in np.unique(which)}


def _label(ax: "Axes", name: str, where, engines, chips) -> None:
    """Writes a region's name into it, at the cell that is farthest from other regions."""
    import numpy as np

    depth, inside = np.zeros(where.shape, int), np.pad(where, 1)
    while inside.any():
        depth += inside[1:-1, 1:-1]
        grown = inside.copy()
        for axis in (0, 1):
            for step in (-1, 1):
                grown &= np.roll(inside, step, axis)
        inside = grown
    row, column = np.unravel_index(int(np.argmax(depth)), depth.shape)
    text = name.replace(": ", ":\n").replace(" hosts' ", " hosts'\n").replace(" servers' ", " servers'\n")
    ax.text(
        engines[column],
        chips[row],
        text,
        ha="center",
        va="center",
        fontsize=8,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.75, "lw": 0},
    )


def _edges(centres):
    """Of cells on a logarithmic axis: half-way between neighbours, and as far beyond the ends."""
    import numpy as np

    logs = np.log2(centres)
    middle = (logs[1:] + logs[:-1]) / 2
    if not middle.size:
        return 2.0 ** np.array([logs[0] - 0.5, logs[0] + 0.5])
    return 2.0 ** np.array([2 * logs[0] - middle[0], *middle, 2 * logs[-1] - middle[-1]])


def _rate(tokens_per_s: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= size:
            return f"{tokens_per_s / size:.3g}{unit}"
    return f"{tokens_per_s:.3g}"
