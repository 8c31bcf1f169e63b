"""Tables of the report: results, cost, diagnostics, provenance, and rewards per held-out problem."""

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from configs.sections.evaluation import HELD_OUT
from launch.tools.report.figures import standard_error
from launch.tools.report.panels import TIME, largest_position
from launch.tools.report.run_data import RunData, column, number
from launch.tools.samples.samples_view import GroupLine, Samples, visible

Row = tuple[str, list[str]]
"""Title and one value per run."""
Json = dict[str, Any]
NOT_RECORDED = "not recorded"
MAX_PROBLEMS = 200
"""Maximum problems per run in the table of problems."""
_MAX_PROMPT = 100
"""Maximum characters of a prompt in the table of problems."""
_MISSING = "-"


def results(runs: Sequence[RunData]) -> list[Row]:
    """Returns the rewards of the runs: first, final and best evaluation, and training; losses of supervised ones."""
    return _known(
        ("mean reward, first evaluation", [_evaluation(r, "eval/reward", lambda values: 0) for r in runs]),
        ("mean reward, final evaluation", [_evaluation(r, "eval/reward", lambda values: -1) for r in runs]),
        ("mean reward, best evaluation", [_evaluation(r, "eval/reward", lambda v: int(v.argmax())) for r in runs]),
        ("mean reward, last tenth", [_number(_of_column(r, "step", "reward/mean", _last_tenth)) for r in runs]),
        ("held-out loss, first evaluation", [_evaluation(r, "eval/loss", lambda values: 0) for r in runs]),
        ("held-out loss, final evaluation", [_evaluation(r, "eval/loss", lambda values: -1) for r in runs]),
    )


def costs(runs: Sequence[RunData]) -> list[Row]:
    """Returns the cost of the runs: updates, time and tokens."""
    return _known(
        ("updates", [_updates(r) for r in runs]),
        ("wall time", [_duration(largest_position(r, TIME)) for r in runs]),
        ("trained tokens", [_number(_of_column(r, "step", "tokens", np.sum)) for r in runs]),
        ("prompt and response tokens", [_number(_of_column(r, "step", "real_tokens", np.sum)) for r in runs]),
        ("throughput", [_number(_tokens_per_s(r), " tokens/s") for r in runs]),
    )


def diagnostics(runs: Sequence[RunData]) -> list[Row]:
    """Returns figures of policy lag, waiting and faults."""

    def row(title: str, kind: str, name: str, how: Callable[[Any], Any], unit: str = "", scale: float = 1.0) -> Row:
        return title, [_number(_of_column(r, kind, name, how) * scale, unit) for r in runs]

    return _known(
        row("response length, last tenth", "step", "response/mean_tokens", _last_tenth, " tokens"),
        row("lag, mean", "step", "lag/mean", np.mean, " steps"),
        row("lag, maximum", "step", "lag/max", np.max, " steps"),
        row("effective sample size, mean", "step", "ess", np.mean),
        row("trainer waiting ratio, mean", "round", "round/waiting_ratio", np.mean),
        row("generation pause, mean", "step", "actor/pause_s", np.mean, " ms", 1e3),
        row("engine against learner, maximum", "probe", "parity/max_abs_dlogprob", np.max, " nats"),
        row("model FLOPs utilization, mean", "step", "mfu", np.mean),
        row("dropped groups", "step", "groups/dropped", lambda values: values[-1]),
    )


def provenance(runs: Sequence[RunData]) -> list[Row]:
    """Returns commit, command, machine, versions and seed of the runs' first starts."""
    first = [run.starts[0] if run.starts else {} for run in runs]
    rows: list[Row] = [
        ("commit", [_commit(of) for of in first]),
        ("command", [_text(of, "command") for of in first]),
        ("machine", [_machine(of) for of in first]),
        ("versions", [_versions(of) for of in first]),
        ("started", [_moment(number(of.get("time_s"))) for of in first]),
        ("preset, seed", [visible(f"{r.config.get('preset', '')}, {r.setting('run', 'seed', '?')}") for r in runs]),
        ("run folder", [visible(str(run.folder)) for run in runs]),
    ]
    if any(len(run.starts) > 1 for run in runs):
        rows.insert(5, ("restarted with", [_restarts(run.starts) for run in runs]))
    return rows


def problems(samples: Samples) -> tuple[list[Json], int]:
    """Returns at most `MAX_PROBLEMS` problems that evaluations stored, held-out problems first, and their number.

    `first` and `last` are the mean rewards of the stored responses at the first and last evaluation.
    """
    groups: dict[tuple[str, str], list[GroupLine]] = {}
    for group in samples.groups:
        if group.kind == "eval" and any(math.isfinite(r.reward) for r in group.responses):
            groups.setdefault((group.set, group.prompt_id or f"problem {group.order}"), []).append(group)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != HELD_OUT, item[0][0], item[1][-1].order))
    rows: list[Json] = []
    for (name, problem), of in ordered[:MAX_PROBLEMS]:
        of = sorted(of, key=lambda group: group.step)
        rows.append(
            {
                "set": visible(name),
                "id": visible(problem),
                "prompt": _start(of[-1].prompt),
                "first": _mean_reward(of[0]),
                "last": _mean_reward(of[-1]),
                "num_evaluations": len({group.step for group in of}),
            }
        )
    return rows, len(ordered)


def _start(prompt: str) -> str:
    text = visible(" ".join(prompt[: 4 * _MAX_PROMPT].split()))
    return text if len(text) <= _MAX_PROMPT else f"{text[:_MAX_PROMPT]}..."


def _mean_reward(group: GroupLine) -> float:
    return float(np.mean([r.reward for r in group.responses if math.isfinite(r.reward)]))


def _known(*rows: Row) -> list[Row]:
    return [row for row in rows if any(value != _MISSING for value in row[1])]


def _evaluation(run: RunData, metric: str, choose: Callable[[Any], int]) -> str:
    values, errors = column(run.of("eval"), metric), standard_error(run, "eval", metric)
    is_known = np.isfinite(values)
    if not is_known.any():
        return _MISSING
    at = np.flatnonzero(is_known)[choose(values[is_known])]
    error = f" ± {errors[at]:.3f}" if math.isfinite(errors[at]) else ""
    return f"{values[at]:.3f}{error}, step {run.of('eval')[at]['step']}"


def _last_tenth(values: Any) -> float:
    return values[-max(1, values.size // 10) :].mean()


def _tokens_per_s(run: RunData) -> float:
    """Returns trained tokens over training seconds; NaN without an update."""
    rates, seconds = (column(run.of("step"), name) for name in ("tokens_per_s", "time/step_s"))
    known = ~np.isnan(rates * seconds)
    return float((rates * seconds)[known].sum() / seconds[known].sum()) if known.any() else math.nan


def _of_column(run: RunData, kind: str, name: str, how: Callable[[Any], Any]) -> float:
    values = column(run.of(kind), name)
    values = values[~np.isnan(values)]
    return float(how(values)) if values.size else math.nan


def _updates(run: RunData) -> str:
    last = run.of("step")[-1]["step"] if run.of("step") else 0
    is_of_end = run.summary.get("steps") == last  # a continuation has not written its own yet
    outcome = run.summary.get("outcome") if is_of_end else "no summary yet"
    return visible(f"{last} of {run.setting('run', 'num_updates', '?')}, {outcome}")


def _number(value: float, unit: str = "") -> str:
    if not math.isfinite(value):
        return _MISSING
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + unit


def _duration(seconds: float) -> str:
    if not seconds:
        return _MISSING
    if seconds < 7200:
        return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _moment(time_s: float) -> str:
    if not 0 < time_s < 1e11:
        return NOT_RECORDED
    return datetime.datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _text(of: Json, name: str) -> str:
    return visible(str(of.get(name) or NOT_RECORDED))


def _commit(of: Json) -> str:
    if not of.get("commit"):
        return NOT_RECORDED
    return _text(of, "commit") + (" with uncommitted changes" if of.get("is_modified") else "")


def _machine(of: Json) -> str:
    if not of.get("host"):
        return NOT_RECORDED
    accelerators = of.get("accelerators")
    names = [str(name) for name in accelerators] if isinstance(accelerators, list) else []
    counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)] or ["no accelerator found"]
    cores = f"{of.get('num_cores', '?')} cores ({of.get('processor', '?')})"
    memory = f"{number(of.get('memory_gib')):.0f} GiB memory"
    return visible(", ".join([str(of["host"]), *counted, cores, memory, str(of.get("system", "?"))]))


def _versions(of: Json) -> str:
    versions = of.get("versions")
    if not isinstance(versions, dict) or not versions:
        return NOT_RECORDED
    return visible(", ".join(f"{name} {version}" for name, version in versions.items()))


def _restarts(starts: Sequence[Json]) -> str:
    shown = {"commit": _commit, "machine": _machine, "versions": _versions}
    found: list[str] = []
    for before, after in zip(starts, starts[1:], strict=False):
        changes = [f"{name} {show(after)}" for name, show in shown.items() if show(before) != show(after)]
        found.append(f"{_moment(number(after.get('time_s')))}: {', '.join(changes) or _text(after, 'command')}")
    return "; ".join(found) or _MISSING
