"""Tables and JSON data of the planner."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import rich.box
from rich.table import Table

from launch.tools.plan.closed_formulas import System, best_split, conventional_rate
from launch.tools.plan.control_plane.capacity import Bottleneck, ClusterModel, bottleneck
from launch.tools.plan.control_plane.loads import Resource
from launch.tools.plan.search import Choice, SearchResult
from launch.tools.plan.sim.event_queue import Lag, SimResult


def parts_table(parts: Sequence[Resource], *, groups_per_s: float) -> Table:
    """Returns a table with one resource per row, by decreasing utilization."""
    title = f"load per resource at {groups_per_s:.3g} groups/s"
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left")
    table.add_column("resource")
    for column in ("load", "capacity", "used"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in sorted(parts, key=lambda p: -p.share):
        table.add_row(
            part.name, quantity(part.load, part.unit), quantity(part.capacity, part.unit), f"{part.share:.1%}"
        )
    return table


def verdict(cluster: ClusterModel, limit: Bottleneck, *, groups_per_s: float) -> list[str]:
    """Returns lines that name the first bottleneck, its pace, the fix, and the next bottleneck."""
    part = limit.part
    lines = [f"first bottleneck: {part.name}, {_at(limit, groups_per_s)}"]
    if part.made_of:
        whole = sum(load for _, load in part.made_of)
        shares = [(name, load / whole) for name, load in sorted(part.made_of, key=lambda item: -item[1])]
        lines.append("composition: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    lines.append(f"remedy: {part.remedy}")
    after = bottleneck(cluster, but={part.name})
    if after.part.share >= 1:
        lines.append(f"next bottleneck: {after.part.full_name}, {_at(after, groups_per_s)}")
    return lines


def _at(limit: Bottleneck, groups_per_s: float) -> str:
    part = limit.part
    if limit.groups_per_s:
        return f"at {limit.groups_per_s:.3g} groups/s, {limit.groups_per_s / groups_per_s:.3g} times the rate above"
    return f"at any rate: load {quantity(part.load, part.unit)}, capacity {quantity(part.capacity, '')}"


def publish_lines(cluster: ClusterModel) -> list[str]:
    """Returns a line on the time to transfer a version to the engines, in full and as a delta."""
    if (transfers := cluster.transfers) is None or transfers.way == "memory":
        return []
    hosts = f"{transfers.num_learner_hosts} learner hosts to {transfers.num_actor_hosts} actor hosts"
    way = "over the learner hosts' links" if transfers.way == "links" else "through a bucket"
    full = f"transfer of a version from {hosts} {way}: {transfers.publish_s(0, held=-1):.3g} s in full"
    delta = f", {transfers.publish_s(1, held=0):.3g} s as a delta" if transfers.full_every > 1 else ""
    return [full + delta]


def as_json(cluster: ClusterModel, limit: Bottleneck, *, groups_per_s: float) -> dict[str, Any]:
    """Returns JSON-serializable data."""
    parts = [dataclasses.asdict(p) | {"share": p.share} for p in cluster.parts(groups_per_s)]
    return {"parts": parts, "limit": dataclasses.asdict(limit)}


def quantity(value: float, unit: str) -> str:
    """Formats a number with three digits and its unit, with a k, M, G or T prefix."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def outcome_table(outcome: SimResult, *, title: str) -> Table:
    """Returns the table of one run, with one number per row."""
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in rows(outcome):
        table.add_row(name, value)
    return table


def rows(outcome: SimResult) -> list[tuple[str, str]]:
    """Returns the numbers of a run with names and units."""

    def of_rounds(name: str) -> str:
        mean = outcome.round_mean(name)
        return "no complete round" if math.isnan(mean) else f"{mean:.3f}"

    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(outcome.num_dropped.items())) or "none"
    return [
        ("step time, s", f"{outcome.step_s:.3f}"),
        ("samples/s", f"{outcome.samples_per_s:.2f}"),
        ("response tokens/s", f"{outcome.tokens_per_s:.0f}"),
        ("rollout to train end of a round, s", of_rounds("rollout_to_train_end_s")),
        ("first dispatch, s", of_rounds("first_dispatch_s")),
        ("waiting ratio (RolloutPipe eq. 4)", of_rounds("waiting_ratio_eq4")),
        ("waiting ratio (section 5.1)", of_rounds("waiting_ratio")),
        ("token lag, steps: mean, p95, max", _lag(outcome.token_lag)),
        ("group lag, steps: mean, p95, max", _lag(outcome.group_lag)),
        ("store time per group, ms", f"{1e3 * outcome.store_s:.3g}"),
        ("publish latency until engines serve, s", f"{outcome.update_s:.3g}"),
        ("engines busy", f"{outcome.engine_utilisation:.1%}"),
        ("engine slots filled", f"{outcome.engine_fill:.1%}"),
        ("learner busy", f"{outcome.learner_utilisation:.1%}"),
        ("groups not trained", dropped),
        ("tokens wasted, recomputed", f"{outcome.wasted_tokens:.0f}, {outcome.recomputed_tokens:.0f}"),
        ("preemptions", str(outcome.num_preemptions)),
    ]


def _lag(lag: Lag) -> str:
    return f"{lag.mean:.2f}, {lag.p95:.0f}, {lag.max}"


def search_table(tried: Sequence[SearchResult], *, limit: int, max_lag: int | None) -> Table:
    """Returns the table of the best choices, the best first."""
    bound = "" if max_lag is None else f", lag at most {max_lag}"
    within = sum(t.within_bound for t in tried)
    title = f"{within} of {len(tried)} choices{bound}"
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left", padding=0, collapse_padding=True)
    for column in (
        "engines",
        "chips\neach",
        "learner\nchips",
        "seqs",
        "window",
        "tokens\n/s",
        "step\ns",
        "max\nlag",
        "token\nlag",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("engines\nbusy", "learner\nbusy", "dispatch\ns"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in tried[:limit]:
        o = t.outcome
        first = o.round_mean("first_dispatch_s")
        table.add_row(
            str(t.choice.num_engines),
            str(t.choice.chips_per_engine),
            str(t.choice.num_learner_chips),
            str(t.choice.max_num_seqs),
            window_name(t.choice),
            f"{o.tokens_per_s:.0f}",
            f"{o.step_s:.2f}",
            f"{o.group_lag.max}" + ("" if t.within_bound else " (over)"),
            f"{o.token_lag.mean:.2f}",
            f"{o.engine_utilisation:.0%}",
            f"{o.learner_utilisation:.0%}",
            "-" if math.isnan(first) else f"{first:.1f}",
        )
    return table


def helpers_line(outcome: SimResult, without: SimResult) -> str:
    """Returns whether engines' chips that help the learner pay, by the runs with and without them."""
    gain = without.step_s / outcome.step_s
    what = "pay" if gain > 1 else "do not pay"
    return (
        f"helpers on the engines' chips {what}: {outcome.step_s:.3g} s per step with them, {without.step_s:.3g} s "
        f"without ({gain:.2f} times as fast)"
    )


def closed_formula_lines(system: System, *, max_lag: int) -> list[str]:
    """Returns a line on PipelineRL's closed formulas at a largest lag: the best split, and conventional RL."""
    split = best_split(system, max_lag)
    conventional = f"conventional RL with {max_lag + 1} steps per round: {conventional_rate(system, max_lag + 1):.0f}"
    if split is None:
        return [f"closed formulas at lag {max_lag}: no split; {conventional} tokens/s"]
    return [
        f"closed formulas at lag {max_lag}: {split.num_engines} engines of {split.num_running} sequences, "
        f"{split.rate:.0f} tokens/s; {conventional} tokens/s"
    ]


def window_name(choice: Choice) -> str:
    """Describes the admission window of a choice."""
    if choice.async_ratio is not None:
        return f"alpha {choice.async_ratio:g}"
    return f"{choice.width} groups" if choice.width else "fifo"


def plot_search(tried: Sequence[SearchResult], path: str | os.PathLike[str], *, max_lag: int | None) -> None:
    """Plots response tokens/s against maximum lag and against the split; one line per window with its best engine.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # optional dependency, needed only for the plot
    except ImportError as e:
        raise ValueError("--plot requires matplotlib; run pip install matplotlib, or remove --plot") from e
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_lag, by_split = figure.subplots(1, 2)
    names = list(dict.fromkeys(window_name(t.choice) for t in sorted(tried, key=_window_rank)))
    for name in names:
        mine = [t for t in tried if window_name(t.choice) == name]
        by_lag.plot(
            [t.outcome.group_lag.max for t in mine], [t.outcome.tokens_per_s for t in mine], "o", ms=4, label=name
        )
        best: dict[int, float] = {}
        for t in mine:
            chips = t.choice.num_engines * t.choice.chips_per_engine
            best[chips] = max(best.get(chips, 0.0), t.outcome.tokens_per_s)
        by_split.plot(sorted(best), [best[n] for n in sorted(best)], "o-", ms=4, label=name)
    if max_lag is not None:
        by_lag.axvline(max_lag, color="black", lw=1, ls=":", label="bound")
    by_lag.set(xlabel="largest lag of a group, steps", ylabel="response tokens/s", ylim=(0, None))
    by_split.set(xlabel="chips of engines", ylabel="response tokens/s at the best engine", ylim=(0, None))
    by_lag.legend(fontsize="small")
    by_split.locator_params(axis="x", integer=True)
    for axes in (by_lag, by_split):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _window_rank(tried: SearchResult) -> tuple[float, int]:
    return (tried.choice.async_ratio or 0.0, tried.choice.width)
