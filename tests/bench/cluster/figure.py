"""The figure of `docs/planning.md`: which part gives out first, to 4,096 engines and 1,024 learner chips.

    python -m tests.bench.cluster.figure [--profile=docs/cluster_profile.json] [--plot=cluster.png]

A panel a variant, one remedy after the other.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags
from jaxtyping import Float64

from configs import overrides
from configs.schema import Config
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.control_plane.capacity import Bottleneck, ClusterModel, bottleneck
from launch.tools.plan.control_plane.loads import Resource
from launch.tools.plan.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENGINES, CHIPS = 4096, 1024
PRESET = "pipelinerl"
_PER_OCTAVE = 4
COLOURS: Mapping[str, str] = {
    "learner compute": "#9ecae1",
    "generation": "#c7e9c0",
    "store: groups": "#fdae6b",
    "store: groups' bytes": "#e6550d",
    "store: claims": "#d94801",
    "store: heartbeats": "#a63603",
    "store: polling": "#fee6ce",
    "store: notifications": "#ffd92f",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A panel of the figure, and a row of the page's table."""

    title: str
    config: Config
    profile: Profile


def variants(profile: Mapping[str, Any]) -> list[Variant]:
    """Returns the figure's panels for a profile as it is stored."""
    store = dict(profile["store"])
    many = store | {"max_connections": 20000}
    fast = {name: value / 10 if name.endswith("_s") else value for name, value in many.items()}
    return [
        Variant(
            title=title,
            config=overrides.apply(
                overrides.load_preset(PRESET), {"publish.serve": "https", "publish.full_every": str(full_every)}
            ),
            profile=plan_profile.from_dict({**profile, "store": its_store}),
        )
        for title, full_every, its_store in (
            ("PostgreSQL as it comes, weights in full", 1, store),
            ("... 20,000 connections", 1, many),
            ("... deltas, 19 versions of 20", 20, many),
            ("... a store ten times as fast", 20, fast),
        )
    ]


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
    isn't what bounds them.
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
    return dataclasses.replace(config, admission=dataclasses.replace(config.admission, sequences=places, width="auto"))


def name_in_figure(part: Resource) -> str:
    """Returns a part's name; the store is several, by what takes most of its time."""
    return part.full_name if part.name == "store" else part.name


def draw(profile: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12.8, 10.7), layout="constrained")
    names: set[str] = set()
    for ax, variant in zip(figure.subplots(2, 2).ravel().tolist(), variants(profile), strict=True):
        cells = scale(variant.config, variant.profile, engines=counts_up_to(ENGINES), learner_chips=counts_up_to(CHIPS))
        names |= _draw(ax, variant.title, cells)
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


def _draw(ax: "Axes", title: str, cells: Sequence[Sequence[Cell]]) -> set[str]:
    """Draws a panel; returns the names of the parts that it shows."""
    from matplotlib.colors import ListedColormap

    engines = np.array([c.num_engines for c in cells[0]], float)
    chips = np.array([row[0].num_learner_chips for row in cells], float)
    parts = list(COLOURS)
    which = np.array([[parts.index(name_in_figure(c.limit.part)) for c in row] for row in cells])
    colours = ListedColormap(list(COLOURS.values()))
    ax.pcolormesh(_edges(engines), _edges(chips), which, cmap=colours, vmin=-0.5, vmax=len(parts) - 0.5)
    rates = np.array([[c.tokens_per_s for c in row] for row in cells])
    if rates.max() > 0:
        low, high = np.floor(np.log10(rates[rates > 0].min())), np.ceil(np.log10(rates.max()))
        levels = 10.0 ** np.arange(low, high + 0.5, 0.5)
        runs = np.ma.masked_less_equal(rates, 0.0)
        lines = ax.contour(engines, chips, runs, levels=levels, colors="black", linewidths=0.7)
        ax.clabel(lines, levels=levels[::2], fmt=lambda rate: f"{rate:.3g}", fontsize=8)
    if (rates <= 0).any():
        ax.contourf(engines, chips, rates <= 0, levels=[0.5, 1.5], colors="none", hatches=[_NEVER])
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="engines", ylabel="learner chips", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return {parts[number] for number in np.unique(which)}


def _edges(centres: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N+1"]:
    """Returns the edges of cells on a logarithmic axis: half-way between neighbours, and as far beyond the ends."""
    logs = np.log2(centres)
    middle = (logs[1:] + logs[:-1]) / 2
    return 2.0 ** np.array([2 * logs[0] - middle[0], *middle, 2 * logs[-1] - middle[-1]])


def main(argv: list[str]) -> None:
    """Draws the figure of a profile."""
    del argv
    draw(dataclasses.asdict(plan_profile.load(flags.FLAGS.profile)), flags.FLAGS.plot)


if __name__ == "__main__":
    flags.DEFINE_string("profile", "docs/cluster_profile.json", "Profile, as `launch.tools.plan` takes it.")
    flags.DEFINE_string("plot", "cluster.png", "Figure to write.")
    app.run(main)
