"""The figure of `tests.bench.overlap`, in the manner of RolloutPipe's Figures 3 to 5."""

import pathlib
from collections.abc import Mapping
from typing import Any

from tests.bench.overlap.rows import Rows
from tests.bench.overlap.setups import FEW_PLACES, FLAT, MANY_PLACES
from tests.bench.rig.figures import pyplot
from tests.bench.rig.report import mean_std
from tests.bench.rig.rig import Result

_COLORS = {"serial": "#8c8c8c", "cgp": "#4c78a8", "rolloutpipe": "#f58518"}
_ROLLOUT, _TRAIN = "#9ecae9", "#e45756"


def round_timeline(result: Result) -> dict[str, Any]:
    """A session's last round: seconds from its tickets to each group's rollout and each training span."""
    start = max(e["ts"] for e in result.events if e["name"] == "issue")

    def spans(*names: str) -> list[tuple[float, float]]:
        found = [e for e in result.events if e["name"] in names and e["ts"] >= start]
        return [((e["ts"] - start) / 1e6, (e["ts"] - start + e["dur"]) / 1e6) for e in found]

    return {"rollout": sorted(spans("rollout")), "train": spans("train", "apply")}


def draw(file: pathlib.Path, rows: Rows, values: Mapping[str, float], timelines: dict[str, dict[str, Any]]) -> None:
    """Writes the PNG: a round of each mode, times with error bars, waiting ratios, and what the frontier brings.

    Args:
      file: where to.
      rows: all engines'; times and ratios are drawn of the one that has `serial`.
      values: of the result.
      timelines: by mode, of the smallest R.
    """

    plt = pyplot()
    sizes = sorted({groups for _, _, groups in rows})
    by_key = {(mode, groups): row for (engine, mode, groups), row in rows.items() if engine == FEW_PLACES.name}
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(12, 8), height_ratios=[1.1, 1], layout="constrained")
    _draw_timelines(top, timelines, sizes[0])
    bottom.axis("off")
    parts = bottom.get_subplotspec().subgridspec(1, 3)
    bars, lines, gains = (fig.add_subplot(part) for part in parts)
    modes = list(timelines)
    for n, mode in enumerate(modes):
        stats = [mean_std(by_key[mode, r].total_s) for r in sizes]
        xs = [i + (n - 1) * 0.27 for i in range(len(sizes))]
        bars.bar(
            xs, [m for m, _ in stats], 0.25, yerr=[s for _, s in stats], color=_COLORS[mode], label=mode, capsize=3
        )
        if mode != "serial":
            for x, r, (mean, std) in zip(xs, sizes, stats, strict=True):
                off = 100 * (1 - mean / by_key["serial", r].mean_s)
                bars.text(x, mean + std, f"{-off:+.0f}%", ha="center", va="bottom", fontsize=8)
        waits = [mean_std(by_key[mode, r].waiting_ratio) for r in sizes]
        lines.errorbar(
            sizes, [m for m, _ in waits], yerr=[s for _, s in waits], color=_COLORS[mode], marker="o", label=mode
        )
    bars.set_xticks(range(len(sizes)), [f"R = {r}" for r in sizes])
    bars.set_ylabel("rollout to train end, s")
    bars.legend(frameon=False)
    lines.set_xticks(sizes)
    lines.set_xlabel("R, groups a round")
    lines.set_ylabel("trainer waiting ratio")
    lines.set_ylim(0, 0.6)
    for setup in (MANY_PLACES, FLAT, FEW_PLACES):
        of_sizes = [values[f"fgd_over_cgp_pct{setup.key}_R{r}"] for r in sizes]
        noise = [values[f"fgd_over_cgp_noise_pct{setup.key}_R{r}"] for r in sizes]
        gains.errorbar(sizes, of_sizes, yerr=noise, marker="o", label=setup.name)
    gains.axhline(0, color="black", lw=1)
    gains.set_xticks(sizes)
    gains.set_xlabel("R, groups a round")
    gains.set_ylabel("rolloutpipe less than cgp, %")
    gains.legend(frameon=False, fontsize=8)
    fig.savefig(file, dpi=130)
    plt.close(fig)


def _draw_timelines(axes: Any, timelines: dict[str, dict[str, Any]], groups: int) -> None:
    ticks, y = [], 0.0
    for mode in reversed(list(timelines)):
        spans = timelines[mode]
        ticks.append((y + 0.5, mode))
        rollouts = spans["rollout"]
        height = 0.65 / max(1, len(rollouts))
        for i, (start, end) in enumerate(rollouts):
            axes.barh(y + 0.3 + (len(rollouts) - i) * height, end - start, height, left=start, color=_ROLLOUT)
        axes.barh([y + 0.15] * len(spans["train"]), [e - s for s, e in spans["train"]], 0.22,
                  left=[s for s, _ in spans["train"]], color=_TRAIN)  # fmt: skip
        y += 1.15
    axes.set_yticks([t for t, _ in ticks], [m for _, m in ticks])
    axes.set_xlabel(f"seconds from the round's tickets, R = {groups}; each blue line a group's rollout, red: training")
