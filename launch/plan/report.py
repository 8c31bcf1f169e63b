"""What the planner prints and draws."""

import math
import os
from collections.abc import Sequence

import rich.box
from rich.table import Table

from launch.plan.outcome import Lag, Outcome
from launch.plan.search import Choice, Tried


def outcome_table(outcome: Outcome, *, title: str) -> Table:
    """One run, a number a row."""
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in rows(outcome):
        table.add_row(name, value)
    return table


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """The numbers of a run, named and with units."""

    def of_rounds(name: str) -> str:
        mean = outcome.round_mean(name)
        return "no whole round" if math.isnan(mean) else f"{mean:.3f}"

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
        ("a group in the store's line, ms", f"{1e3 * outcome.store_s:.3g}"),
        ("export to engines that serve it, s", f"{outcome.update_s:.3g}"),
        ("engines busy", f"{outcome.engine_utilisation:.1%}"),
        ("engine places filled", f"{outcome.engine_fill:.1%}"),
        ("learner computes", f"{outcome.learner_utilisation:.1%}"),
        ("groups not trained", dropped),
        ("tokens wasted, recomputed", f"{outcome.wasted_tokens:.0f}, {outcome.recomputed_tokens:.0f}"),
        ("preemptions", str(outcome.num_preemptions)),
    ]


def _lag(lag: Lag) -> str:
    return f"{lag.mean:.2f}, {lag.p95:.0f}, {lag.max}"


def search_table(tried: Sequence[Tried], *, limit: int, max_lag: int | None) -> Table:
    """The best choices, the best first."""
    bound = "" if max_lag is None else f", lag at most {max_lag}"
    within = sum(t.within_bound for t in tried)
    title = f"{within} of {len(tried)} choices{bound}"
    table = Table(title=title, box=rich.box.SIMPLE, title_justify="left", padding=0, collapse_padding=True)
    for column in ("en-\ngines", "learn.\nchips", "seqs", "window", "tokens\n/s", "step\ns", "max\nlag", "token\nlag"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("engines\nbusy", "learner\nbusy", "first\nd. s"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in tried[:limit]:
        o = t.outcome
        first = o.round_mean("first_dispatch_s")
        table.add_row(
            str(t.choice.num_engines),
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


def window_name(choice: Choice) -> str:
    """What bounds the groups in service."""
    if choice.async_ratio is not None:
        return f"alpha {choice.async_ratio:g}"
    return f"{choice.width} groups" if choice.width else "fifo"


def plot_search(tried: Sequence[Tried], path: str | os.PathLike[str], *, max_lag: int | None) -> None:
    """Response tokens/s against the largest lag, and against the split; a line a window, at its best engine size.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an extra: everything but the plot works without it
    except ImportError as e:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from e
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
            best[t.choice.num_engines] = max(best.get(t.choice.num_engines, 0.0), t.outcome.tokens_per_s)
        by_split.plot(sorted(best), [best[n] for n in sorted(best)], "o-", ms=4, label=name)
    if max_lag is not None:
        by_lag.axvline(max_lag, color="black", lw=1, ls=":", label="bound")
    by_lag.set(xlabel="largest lag of a group, steps", ylabel="response tokens/s", ylim=(0, None))
    by_split.set(xlabel="engines", ylabel="response tokens/s at the best max_num_seqs", ylim=(0, None))
    by_lag.legend(fontsize="small")
    by_split.locator_params(axis="x", integer=True)
    for axes in (by_lag, by_split):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _window_rank(tried: Tried) -> tuple[float, int]:
    return (tried.choice.async_ratio or 0.0, tried.choice.width)
