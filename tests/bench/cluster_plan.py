"""Which part of a cluster saturates first, for every number of engines and learner chips.

    python -m tests.bench.cluster_plan --config=pipelinerl --profile=docs/cluster_profile.json \
        --plot=cluster.png --variant="deltas: publish.serve=https, publish.full_every=20"

Each --variant is a panel: "TITLE: section.field=value, profile.section.field=value, ...".
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import rich.box
from absl import app, flags
from rich.table import Table

from configs import overrides
from configs.schema import Config
from launch.terminal import make_console
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.control_plane.capacity import Bottleneck, ClusterModel, bottleneck
from launch.tools.plan.control_plane.loads import Resource
from launch.tools.plan.plan_tables import quantity
from launch.tools.plan.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PER_OCTAVE = 4
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
_PROFILE = "profile."
_TABLE_COLUMNS = 5
"""Columns and rows of the printed table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One size."""

    num_engines: int
    num_learner_chips: int
    limit: Bottleneck
    tokens_per_s: float
    """Response tokens trained a second, at that limit."""


def counts_up_to(most: int, *, per_octave: int = _PER_OCTAVE) -> list[int]:
    """1 to `most`, about `per_octave` in each doubling, powers of two and `most` among them."""
    num = per_octave * (most.bit_length() - 1)
    return sorted({most, *(min(most, round(2 ** (i / per_octave))) for i in range(num + 1))})


def scale(
    config: Config, profile: Profile, *, engines: Sequence[int], learner_chips: Sequence[int]
) -> list[list[Cell]]:
    """A row a number of chips, a column a number of engines.

    A window (admission.policy=window, no async_ratio) is made as wide as all engines together have places, so that it
    isn't what bounds them. Batch, round and whatever else a config says stay as they are.
    """
    return [[_cell(config, profile, num_engines=n, num_learner_chips=c) for n in engines] for c in learner_chips]


def _cell(config: Config, profile: Profile, *, num_engines: int, num_learner_chips: int) -> Cell:
    sized = dataclasses.replace(profile, num_engines=num_engines, num_learner_chips=num_learner_chips)
    cluster = ClusterModel.of(_filling(config, sized), sized)
    limit = bottleneck(cluster)
    work = cluster.workload
    tokens = work.num_samples * work.response_tokens
    return Cell(
        num_engines=num_engines,
        num_learner_chips=num_learner_chips,
        limit=limit,
        tokens_per_s=limit.groups_per_s * tokens,
    )


def _filling(config: Config, profile: Profile) -> Config:
    if config.admission.policy != "window" or config.admission.async_ratio is not None:
        return config
    places = profile.num_engines * profile.engine.max_num_seqs
    return dataclasses.replace(config, admission=dataclasses.replace(config.admission, sequences=places, width=0))


def variant_of(text: str, config: Config, profile: Profile) -> tuple[str, Config, Profile]:
    """(title, config, profile) of a variant.

    Raises:
      ValueError: it has no title, a field that is not there, or a value that doesn't fit.
    """
    title, sep, changes = text.partition(":")
    if not sep or not title.strip():
        raise ValueError(f'--variant wants "TITLE: section.field=value, ...", got {text!r}')
    of_config: dict[str, str] = {}
    raw = plan_profile.to_dict(profile)
    for change in filter(None, (c.strip() for c in changes.split(","))):
        path, sep, value = change.partition("=")
        if not sep:
            raise ValueError(f"--variant: {change!r} has no value, as in {change}=VALUE")
        if path.startswith(_PROFILE):
            _set(raw, path, value)
        else:
            of_config[path] = value
    return title.strip(), overrides.apply(config, of_config), plan_profile.from_dict(raw)


def _set(raw: dict[str, Any], path: str, value: str) -> None:
    *sections, name = path.removeprefix(_PROFILE).split(".")
    node: Any = raw
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        raise ValueError(f"--variant: the profile has no {path.removeprefix(_PROFILE)}")
    try:
        node[name] = msgspec.json.decode(value)
    except msgspec.DecodeError:
        node[name] = value


def scale_table(cells: Sequence[Sequence[Cell]]) -> Table:
    """Rows of chips and engines: what gives out first, and the response tokens/s up to there."""
    table = Table(title="gives out first, and response tokens/s up to there", box=rich.box.SIMPLE, title_justify="left")
    table.add_column("learner\nchips", justify="right")
    for cell in cells[0]:
        table.add_column(f"{cell.num_engines}\nengines", justify="left")
    for row in cells:
        shown = [f"{c.limit.part.full_name}\n{quantity(c.tokens_per_s, '')}" for c in row]
        table.add_row(str(row[0].num_learner_chips), *shown)
    return table


def _some(cells: list[list[Cell]]) -> list[list[Cell]]:
    """Few enough for a terminal: the first and the last, and what lies evenly between."""
    return [_evenly(row, _TABLE_COLUMNS) for row in _evenly(cells, _TABLE_COLUMNS)]


def _evenly(items: list[Any], num: int) -> list[Any]:
    last = len(items) - 1
    return [items[i] for i in sorted({round(i * last / (num - 1)) for i in range(num)})]


def plot_scale(panels: Mapping[str, Sequence[Sequence[Cell]]], path: str | os.PathLike[str]) -> None:
    """Writes a PNG.

    Args:
      panels: by title, rows of cells as `scale` gives them.
      path: of the PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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


def name_in_figure(part: Resource) -> str:
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


def main(argv: list[str]) -> None:
    """Prints a table for each variant, and writes figure and numbers where they are asked for."""
    del argv
    config = overrides.load_preset(flags.FLAGS.config)
    profile = plan_profile.load(flags.FLAGS.profile)
    engines, chips = counts_up_to(flags.FLAGS.scale_engines), counts_up_to(flags.FLAGS.scale_chips)
    console, panels = make_console(), {}
    for text in flags.FLAGS.variant or [f"{config.preset}:"]:
        title, its_config, its_profile = variant_of(text, config, profile)
        panels[title] = scale(its_config, its_profile, engines=engines, learner_chips=chips)
        console.print(title)
        console.print(scale_table(_some(panels[title])))
    if flags.FLAGS.plot:
        plot_scale(panels, flags.FLAGS.plot)
    if flags.FLAGS.json:
        data = {title: [[dataclasses.asdict(c) for c in row] for row in cells] for title, cells in panels.items()}
        with open(flags.FLAGS.json, "w") as file:
            json.dump(data, file, indent=2)


if __name__ == "__main__":
    flags.DEFINE_string("config", "pipelinerl", "Preset.")
    flags.DEFINE_string("profile", "docs/cluster_profile.json", "Profile, as `launch.tools.plan` takes it.")
    flags.DEFINE_integer("scale_engines", 4096, "Largest number of engines.", lower_bound=1)
    flags.DEFINE_integer("scale_chips", 1024, "Largest number of learner chips.", lower_bound=1)
    flags.DEFINE_multi_string("variant", [], "A panel, as in the module's docstring; any number of times.")
    flags.DEFINE_string("plot", None, "Figure to write, a PNG.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    app.run(main)
