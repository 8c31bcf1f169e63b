"""Figures of the report: their metrics (learner/metrics/metric_names.py) and axes."""

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from configs.sections.evaluation import HELD_OUT
from launch.tools.report.run_data import POSITION, RunData, column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A metric in a figure; `*` in its name matches several metrics."""

    metric: str
    label: str = ""
    """Legend label; empty means the text matched by `*`, or the metric."""
    kind: str = "step"
    """Kind of the metric rows."""
    by_position: bool = False
    """True if the metric depends on the position of an update in its round: one curve per position in short rounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure over the steps of a run."""

    title: str
    y_label: str
    """Label of the y axis, with its unit."""
    lines: tuple[Line, ...]
    note: str = ""
    is_log: bool = False
    """True if the y axis is logarithmic at first."""
    unit: str = ""
    """Unit; if set, a few very large values (such as an update that compiles) may be clipped."""


def _lines(kind: str = "step", /, **labels: str) -> tuple[Line, ...]:
    return tuple(Line(metric=name.replace("__", "/"), label=label, kind=kind) for name, label in labels.items())


REWARD = Panel(
    title="Reward",
    y_label="mean reward",
    lines=(
        Line(metric="eval/reward", label="held-out problems", kind="eval"),
        Line(metric="reward/mean", label="training"),
    ),
    note="Error bars: one standard error over the held-out problems. Band: standard error of the running mean.",
)
"""Figure at the top of the page, unless no run has rewards."""
LOSS = Panel(
    title="Loss",
    y_label="nats, normalized",
    lines=(Line(metric="loss", label="training"), Line(metric="eval/loss", label="held-out", kind="eval")),
)
"""Figure at the top of a supervised run, which has no rewards."""
SCORES = Panel(title="Scores by verifier", y_label="mean score", lines=(Line(metric="rewards/*"),))
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Rewards": (
        SCORES,
        Panel(
            title="Learning signal",
            y_label="fraction per update",
            lines=_lines(
                reward__zero_variance_groups="zero-variance groups", response__truncated="truncated responses"
            ),
        ),
        Panel(
            title="Response length",
            y_label="sampled tokens",
            lines=_lines(response__mean_tokens="mean", response__max_tokens="maximum"),
        ),
        Panel(
            title="Episodes",
            y_label="turns, and their reward",
            lines=_lines(turns__mean="turns", turns__reward="reward"),
        ),
    ),
    "Policy lag": (
        Panel(
            title="Lag",
            y_label="steps",
            lines=(
                Line(metric="lag/mean", label="mean", by_position=True),
                Line(metric="lag/max", label="maximum"),
            ),
        ),
        Panel(
            title="Effective sample size",
            y_label="0 to 1",
            lines=(
                Line(metric="ess", label="tokens", by_position=True),
                Line(metric="ess_sequence", label="sequences", by_position=True),
            ),
        ),
        Panel(
            title="Engine against learner",
            y_label="nats",
            lines=(
                Line(metric="mismatch_kl_k3", label="KL (k3)", by_position=True),
                Line(metric="max_abs_dlogprob", label="maximum |log pi - log mu|", by_position=True),
                Line(metric="max_abs_dlogprob_lag0", label="maximum at lag 0"),
            ),
            is_log=True,
            note="At lag 0 both use equal weights, so the difference is numerical.",
        ),
        Panel(
            title="Probes after a publish",
            y_label="maximum |log pi - log mu|, nats",
            lines=_lines("probe", parity__max_abs_dlogprob="engine against learner"),
            is_log=True,
        ),
        Panel(
            title="Importance ratios",
            y_label="pi / mu",
            lines=_lines(ratio__p01="1st percentile", ratio__p50="median", ratio__p99="99th percentile"),
        ),
        Panel(title="Clipped tokens", y_label="fraction of tokens", lines=_lines(clip_fraction="clipped")),
        Panel(
            title="Corrected tokens",
            y_label="fraction of tokens or sequences",
            lines=_lines(
                correction__masked_tokens="masked tokens",
                correction__rejected_tokens="rejected tokens",
                correction__vetoed_sequences="vetoed sequences",
            ),
        ),
    ),
    "Optimizer": (
        Panel(title="Learning rate", y_label="learning rate", lines=_lines(learning_rate="learning rate")),
        Panel(title="Gradient norm", y_label="global norm", lines=_lines(grad_norm="before clipping"), is_log=True),
        Panel(title="Entropy", y_label="nats per token", lines=_lines(entropy="entropy")),
        LOSS,
        Panel(
            title="KL to frozen policies",
            y_label="nats",
            lines=_lines(reference_kl="reference policy", teacher_kl="teacher"),
        ),
        Panel(
            title="Critic",
            y_label="1 - variance of (return - value) / variance of returns",
            lines=_lines(critic__explained_variance="explained variance"),
            note="At 0 the critic is no better than the mean return.",
        ),
        Panel(
            title="Values and returns",
            y_label="units of the reward",
            lines=_lines(critic__mean_value="mean value", critic__mean_return="mean return"),
        ),
        Panel(
            title="Load of experts",
            y_label="1 is balanced",
            lines=_lines(
                routing__max_load="most loaded expert over its layer's mean",
                routing__load_entropy="entropy over log(experts)",
            ),
        ),
    ),
    "Performance": (
        Panel(
            title="Throughput",
            y_label="tokens/s",
            unit="tokens/s",
            lines=_lines(tokens_per_s="prompt and response"),
        ),
        Panel(title="Model FLOPs utilization (MFU)", y_label="0 to 1", lines=_lines(mfu="MFU")),
        Panel(title="Model FLOPs", y_label="TFLOP/s", unit="TFLOP/s", lines=_lines(model_tflops_per_s="all chips")),
        Panel(
            title="Learner's peak memory",
            y_label="GiB",
            unit="GiB",
            lines=_lines(memory__device_peak_gib="fullest device", memory__host_peak_gib="host"),
        ),
        Panel(
            title="Trainer waiting ratio",
            y_label="fraction of a round",
            lines=_lines(
                "round",
                round__waiting_ratio="wait / (wait + compute)",
                round__waiting_ratio_eq4="until the first U groups",
            ),
            note="Definitions: RolloutPipe section 5.1 and equation 4.",
        ),
        Panel(
            title="Time per update",
            y_label="seconds",
            unit="s",
            lines=_lines(time__step_s="total", time__train_s="compute", time__wait_s="wait for groups"),
        ),
        Panel(
            title="Time per round",
            y_label="seconds",
            unit="s",
            lines=_lines(
                "round",
                round__rollout_to_train_end_s="first ticket to last update",
                round__first_dispatch_s="first ticket to first U groups",
                round__recovered_s="first U groups to last group (RolloutPipe eq. 3)",
            ),
        ),
        Panel(
            title="Weight updates",
            y_label="seconds",
            unit="s",
            lines=_lines(
                time__publish_s="publish latency", actor__pause_s="generation pause", actor__prefetch_s="prefetch"
            ),
        ),
        Panel(
            title="Dropped groups, cumulative",
            y_label="groups",
            lines=_lines(
                groups__dropped="all",
                groups__stale="over the lag bound",
                groups__zero_variance="zero variance",
                groups__reissued="reissued tickets",
            ),
        ),
    ),
}


def expand(panel: Panel, names: Mapping[str, Collection[str]]) -> list[Line]:
    """Returns the lines of a panel that have values, with `*` and positions expanded; `names` are metrics by kind."""
    found: list[Line] = []
    positions = sorted(kind for kind in names if kind.startswith(POSITION))
    for line in panel.lines:
        known = names.get(line.kind, ())
        if line.by_position and positions and line.metric in known:
            for kind in positions:
                position = kind.removeprefix(POSITION).replace("/", " of ")
                found.append(dataclasses.replace(line, kind=kind, label=f"{line.label}, update {position}"))
            continue
        if "*" not in line.metric:
            found += [line] * (line.metric in known)
            continue
        head = line.metric.partition("*")[0]
        matching = [n for n in sorted(known) if fnmatch.fnmatchcase(n, line.metric) and not n.endswith("_stderr")]
        found += [dataclasses.replace(line, metric=n, label=line.label or n.removeprefix(head)) for n in matching]
    return found


def of_set(kind: str, names: Mapping[str, Collection[str]]) -> Panel:
    """Returns the panel of an evaluation set with rows of `kind` (eval/SET); of the held-out set (eval) only if k > 1.

    With one sample per problem, all estimates are the mean reward or the pass rate.
    """
    name = HELD_OUT if kind == "eval" else kind.removeprefix("eval/")
    head = f"eval/{name}/"
    patterns = tuple(Line(metric=f"{head}{estimate}", kind=kind) for estimate in ("avg@*", "pass@*", "maj@*", "loss"))
    found = expand(Panel(title="", y_label="", lines=patterns), names)
    if kind == "eval" and all(line.metric.endswith("@1") for line in found):
        found = []
    return Panel(
        title=f"Evaluation set {name}",
        y_label="fraction, mean reward, or loss in nats",
        lines=tuple(dataclasses.replace(line, label=line.metric.removeprefix(head)) for line in found),
        note="Error bars: one standard error.",
    )


STEP, TIME, TOKENS, SAMPLES = "step", "time", "tokens", "samples"
_CUMULATIVE = {TOKENS: ("tokens", "trained tokens"), SAMPLES: ("sequences", "trained samples")}
"""Metric that an axis sums over the updates, and the axis's title."""
_TIME_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_COUNT_UNITS = ((2e9, 1e9, ", billions"), (2e6, 1e6, ", millions"), (2e4, 1e3, ", thousands"), (0.0, 1.0, ""))
"""Pairs of units: (minimum of the largest value, divisor, name)."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis over which curves may be drawn."""

    name: str
    title: str
    """Title in the selector."""
    label: str
    """Axis label with its unit."""
    largest: float
    per_unit: float = 1.0


class Axes:
    """Axes of runs: steps, and time, tokens and samples if a run has them, in units that fit all runs."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        names = (STEP, TIME, *_CUMULATIVE)
        largest = {name: max((largest_position(run, name) for run in runs), default=0.0) for name in names}
        self.all = [Axis(STEP, "steps", "optimizer step", max(largest[STEP], 1.0))]
        if largest[TIME] > 0:
            _, per_unit, unit = next(u for u in _TIME_UNITS if largest[TIME] >= u[0])
            label = f"{unit} since the start of training"
            self.all.append(Axis(TIME, "training time", label, largest[TIME] / per_unit, per_unit))
        for name, (_, title) in _CUMULATIVE.items():
            if largest[name] > 0:
                _, per_unit, unit = next(u for u in _COUNT_UNITS if largest[name] >= u[0])
                self.all.append(Axis(name, title, f"{title}{unit}", largest[name] / per_unit, per_unit))

    def columns(self, run: RunData, kind: str) -> dict[str, Float64[np.ndarray, " N"]]:
        """Returns the position of each row on each axis; NaN if the run lacks the axis."""
        return {axis.name: positions(run, kind, axis.name) / axis.per_unit for axis in self.all}


def positions(run: RunData, kind: str, axis: str) -> Float64[np.ndarray, " N"]:
    """Returns the position of each row: step, seconds since training began, tokens or samples trained up to its step.

    Seconds come from the rows' timestamps (`time_s`), so they include pauses between starts of a run. Without
    timestamps, they are the cumulative update times. A row without a timestamp, such as an evaluation, gets the time of
    its step.
    """
    at = column(run.of(kind), "step")
    if axis == STEP:
        return at
    updates = run.of("step")
    steps = column(updates, "step")
    if not steps.size:
        return np.full(at.size, np.nan)
    if axis in _CUMULATIVE:
        trained = column(updates, _CUMULATIVE[axis][0])
        return _between(at, steps, np.cumsum(_known(trained))) if np.isfinite(trained).any() else at * np.nan
    clock, took_s = column(updates, "time_s"), _known(column(updates, "time/step_s"))
    if not np.isfinite(clock).all():
        return _between(at, steps, np.cumsum(took_s)) if took_s.any() else at * np.nan
    begin_s = min([clock[0] - took_s[0], *(_first_s(run, of) for of in run.rows)])
    own = column(run.of(kind), "time_s") - begin_s
    by_step = _between(at, steps, clock - begin_s, start=clock[0] - took_s[0] - begin_s)
    return np.where(np.isfinite(own), own, by_step)


def _known(values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
    return np.where(np.isfinite(values), values, 0.0)


def _first_s(run: RunData, kind: str) -> float:
    """Returns the time of the first row of a kind, Unix time in seconds; infinity without timestamps."""
    found = column(run.of(kind), "time_s")
    found = found[np.isfinite(found)]
    return float(found.min()) if found.size else float("inf")


def _between(
    at: Float64[np.ndarray, " N"],
    steps: Float64[np.ndarray, " M"],
    values: Float64[np.ndarray, " M"],
    *,
    start: float = 0.0,
) -> Float64[np.ndarray, " N"]:
    """Interpolates `values` between steps; `start` applies before the first step."""
    return np.interp(at, [steps[0] - 1, *steps], [start, *values])


def largest_position(run: RunData, axis: str) -> float:
    """Returns the largest position of any row on an axis; 0 if the run lacks the axis."""
    found = [positions(run, kind, axis) for kind in run.rows]
    known = [float(np.nanmax(values)) for values in found if np.isfinite(values).any()]
    return max((value for value in known if np.isfinite(value)), default=0.0)
