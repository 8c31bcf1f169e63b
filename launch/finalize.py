"""Final output of a run: its summary, the report's location, and a few samples."""

import contextlib
import json
import math
import pathlib
import re
import statistics
import sys
from typing import Any

from absl import logging
from rich.console import Console
from rich.table import Table

from bridge import timeline
from bridge.files import replace_file
from configs.run_folder import RunFolder
from configs.sections.evaluation import HELD_OUT
from launch import cli
from launch.live_view import MetricsTail
from launch.startup.prepare_run import PreparedRun
from launch.supervision.supervisor import RunOutcome
from launch.terminal import make_console
from launch.tools.report.timeline_events import num_bytes
from launch.tools.samples import samples_view
from launch.tools.samples.samples_view import Query, choose, pairs, read_samples
from learner.metrics.metric_names import over_all_starts
from learner.metrics.tracker_kinds import KINDS
from learner.metrics.trackers import SentSteps

_RESTART = re.compile(r"-r\d+$")


def finish(prepared: PreparedRun, ending: RunOutcome) -> dict[str, Any]:
    """Writes summary.json, merges the event logs, which may be large, and prints the summary."""
    run = RunFolder(prepared.folder)
    summary = summarize(prepared, ending)
    replace_file(run.summary, (json.dumps(summary, indent=2) + "\n").encode())
    try:
        timeline.merge(run.events, run.trace)
    except (OSError, ValueError) as e:
        print(f"error: cannot write the trace of the run: {cli.one_line(e)}", file=sys.stderr)
    _print(prepared, summary)
    return summary


def summarize(prepared: PreparedRun, ending: RunOutcome) -> dict[str, Any]:
    """Returns the run's summary; null for values that were not measured."""
    # complete lines only: a killed learner leaves a partial one
    _, rows = MetricsTail(RunFolder(prepared.folder).metrics).new_rows()
    steps = over_all_starts(r for r in rows if r["kind"] == "step")
    held_out = [r for r in rows if r["kind"] == "eval"]
    evals, losses = ([r for r in held_out if f"eval/{of}" in r] for of in ("reward", "loss"))
    of_sets = {r["set"]: r for r in rows if "set" in r}
    rounds = [r for r in rows if r["kind"] == "round"]
    probes = [r for r in rows if r["kind"] == "probe"]

    def known(rows: list[dict[str, Any]], name: str) -> list[float]:
        return [r[name] for r in rows if r.get(name) is not None]

    def mean(rows: list[dict[str, Any]], name: str) -> float | None:
        values = known(rows, name)
        return statistics.fmean(values) if values else None

    saved = [int(f.name) for f in RunFolder(prepared.folder).checkpoints.glob("*") if f.name.isdigit()]
    return {
        "preset": prepared.config.preset,
        "outcome": ending.value,
        "steps": steps[-1]["step"] if steps else 0,
        "checkpoint": max(saved, default=None),
        "held_out_reward_start": evals[0]["eval/reward"] if evals else None,
        "held_out_reward_end": evals[-1]["eval/reward"] if evals else None,
        "held_out_loss_start": losses[0]["eval/loss"] if losses else None,
        "held_out_loss_end": losses[-1]["eval/loss"] if losses else None,
        "held_out_problems": held_out[-1]["problems"] if held_out else 0,
        "held_out": [[r["step"], r["eval/reward"]] for r in evals],
        "evaluations": {name: _estimates(row) for name, row in sorted(of_sets.items())},
        "truncated_responses": mean(steps, "response/truncated"),
        "training_s": sum(r["time/step_s"] for r in steps),
        "tokens_per_s": tokens_per_s(steps),
        "learning_speed": learning_speed(steps, evals),
        "lag_mean": mean(steps, "lag/mean"),
        "lag_max": max(known(steps, "lag/max"), default=None),
        "ess": mean(steps, "ess"),
        "pause_s": mean(steps, "actor/pause_s"),
        "waiting_ratio": mean(rounds, "round/waiting_ratio"),
        "waiting_ratio_eq4": mean(rounds, "round/waiting_ratio_eq4"),
        "parity_max_abs_dlogprob": max(known(probes, "parity/max_abs_dlogprob"), default=None),
        "trained_groups": sum(len(r.get("groups", ())) for r in steps),
        "dropped_groups": steps[-1].get("groups/dropped", 0) if steps else 0,
        "engines": engines(RunFolder(prepared.folder).events),
    }


def tokens_per_s(steps: list[dict[str, Any]]) -> float | None:
    """Returns trained tokens over training seconds. The mean of the updates' rates would overstate it."""
    timed = [(r["tokens_per_s"], r["time/step_s"]) for r in steps if r.get("tokens_per_s") is not None]
    seconds = sum(step_s for _, step_s in timed)
    return sum(rate * step_s for rate, step_s in timed) / seconds if seconds else None


def learning_speed(steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> dict[str, float] | None:
    """Returns a run's learning speed dR/dt and its factors (PipelineRL eq. 7); None with fewer than three evaluations.

    R is the held-out reward, S the trained samples, t the seconds of training. `effectiveness` dR/dS is the slope of R
    over S by least squares, with its standard error; `throughput` dS/dt is of the whole run; `speed` is their product.
    """
    samples = [sum(row["sequences"] for row in steps if row["step"] <= e["step"]) for e in evals]
    rewards = [e["eval/reward"] for e in evals]
    spread = sum((s - statistics.fmean(samples)) ** 2 for s in samples) if samples else 0.0
    if len(evals) < 3 or not spread:
        return None
    slope, intercept = statistics.linear_regression(samples, rewards)
    squares = sum((r - intercept - slope * s) ** 2 for s, r in zip(samples, rewards, strict=True))
    throughput = sum(row["sequences"] for row in steps) / sum(row["time/step_s"] for row in steps)
    return {
        "effectiveness": slope,
        "effectiveness_stderr": math.sqrt(squares / (len(evals) - 2) / spread),
        "throughput": throughput,
        "speed": slope * throughput,
    }


def _estimates(row: dict[str, Any]) -> dict[str, Any]:
    prefix = f"eval/{row['set']}/"
    shown = {k: v for k, v in row.items() if "@" in k or k == f"{prefix}loss"}
    return {"step": row["step"]} | {k.removeprefix(prefix): v for k, v in shown.items()}


def engines(events: pathlib.Path) -> dict[str, dict[str, int]]:
    """Returns the training tickets completed and the number of starts per actor role.

    A ticket is a group, or one sample if samples are issued as separate tickets.
    """
    found: dict[str, dict[str, int]] = {}
    for path in sorted(events.glob("actor-*.jsonl")):
        made = found.setdefault(_RESTART.sub("", path.stem), {"tickets": 0, "starts": 0})
        # event logs are long: read line by line, without parsing
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                made["tickets"] += '"name": "reward"' in line and '"kind": "train"' in line
                made["starts"] += '"name": "process_name"' in line
    return found


def _print(prepared: PreparedRun, summary: dict[str, Any]) -> None:
    console = make_console()
    table = Table(title=f"{prepared.config.run.name}: {summary['outcome']}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)

    def row(title: str, value: float | None, form: str = ".3f", unit: str = "", factor: float = 1) -> None:
        if value is not None:
            table.add_row(title, f"{factor * value:{form}}{unit}")

    row("optimizer steps", summary["steps"], "d")
    if prepared.config.run.num_updates > summary["steps"]:
        row("steps kept in the last checkpoint", summary["checkpoint"] or 0, "d")
    row("held-out reward, start", summary["held_out_reward_start"])
    row("held-out reward, end", summary["held_out_reward_end"])
    row("held-out loss, start", summary["held_out_loss_start"], unit=" nats/token")
    row("held-out loss, end", summary["held_out_loss_end"], unit=" nats/token")
    row("held-out problems", summary["held_out_problems"], "d")
    for name, found in summary["evaluations"].items():
        for metric, value in found.items():
            is_told = name == HELD_OUT and metric.endswith("@1")  # in a row above
            if "@" in metric and not metric.endswith("_stderr") and not is_told:
                error = found.get(f"{metric}_stderr")
                row(f"{name} {metric}", value, unit="" if error is None else f" +- {error:.3f}")
            elif metric == "loss" and name != HELD_OUT:
                row(f"{name} loss", value, unit=" nats/token")
    row("truncated responses", summary["truncated_responses"])
    row("training time", summary["training_s"], ".0f", " s")
    row("prompt and response tokens per second", summary["tokens_per_s"], ",.0f")
    if (found := summary["learning_speed"]) is not None:
        row("held-out reward per 1,000 samples", 1e3 * found["effectiveness"], ".2g")
        row("samples trained per second", found["throughput"], ",.1f")
    row("lag, mean", summary["lag_mean"], ".2f", " steps")
    row("lag, max", summary["lag_max"], ".0f", " steps")
    row("effective sample size", summary["ess"])
    row("generation pause per update", summary["pause_s"], ".0f", " ms", factor=1e3)
    row("trainer waiting ratio (eq. 4)", summary["waiting_ratio_eq4"])
    row("trainer waiting ratio (5.1)", summary["waiting_ratio"])
    if len(made := summary["engines"]) > 1:
        row("engines", len(made), "d")
        row("tickets per engine, min", min(e["tickets"] for e in made.values()), "d")
        row("tickets per engine, max", max(e["tickets"] for e in made.values()), "d")
    row("engine vs learner, max |dlogprob|", summary["parity_max_abs_dlogprob"], ".1e", " nats")
    console.print(table)
    run = RunFolder(prepared.folder)
    console.print(f"metrics      {run.metrics}", soft_wrap=True)
    console.print(f"tensorboard  tensorboard --logdir {run.tensorboard}", soft_wrap=True)
    console.print(f"event log    {run.trace}   (open it at https://ui.perfetto.dev)", soft_wrap=True)
    console.print(f"checkpoints  {run.checkpoints}", soft_wrap=True)
    if prepared.config.run.num_updates > summary["steps"]:
        kept = summary["checkpoint"] or 0
        again = f" and repeats steps {kept + 1} to {summary['steps']}" if summary["steps"] > kept else ""
        console.print(f"to resume    run the same command again: it continues after step {kept}{again}", soft_wrap=True)
    for name in filter(KINDS.__contains__, prepared.config.run.tracker_names):
        with contextlib.suppress(ValueError):
            marks = SentSteps.read(run.tracker(name).with_suffix(".json"))
            again = f"; send them with python -m launch.services.track --run_dir={run.path} --tracker={name}"
            left = f"   ({marks.num_left} rows not sent: {marks.problem}{again})" if marks.problem else ""
            console.print(f"{name:<12} {marks.where}{left}", soft_wrap=True, markup=False, highlight=False)
    model = run.model(summary["steps"])
    if model.is_dir():
        console.print(f"model        {model}   (Hugging Face format)", soft_wrap=True)


NUM_SAMPLES = 3
_LONG_BYTES = 30_000_000
"""Event log size in bytes above which merging takes more than a few seconds."""


def finalize_run(prepared: PreparedRun, ending: RunOutcome) -> None:
    """Writes and prints the summary, then the report and samples unless the run was interrupted.

    Errors such as a full disk or a damaged line are printed and do not change the run's outcome.
    """
    try:
        if (size := num_bytes(prepared.folder)) > _LONG_BYTES:
            print(f"merging {size / 1e6:.0f} MB of events into the trace and the report", flush=True)
        finish(prepared, ending)
    except (OSError, ValueError) as e:
        print(f"error: cannot write the summary of the run: {cli.one_line(e)}", file=sys.stderr)
    if ending in (RunOutcome.DONE, RunOutcome.FAILED):
        show(prepared.folder, make_console(highlight=False))


def show(folder: pathlib.Path, console: Console) -> None:
    """Writes the report and prints its path, then samples of first and last responses. Errors are only printed."""
    try:
        _show_samples(folder, console)
        _write_report(folder, console)
    except Exception as e:  # a report error must not fail a finished run
        logging.debug("report of %s", folder, exc_info=True)
        console.print(f"report       not written: {type(e).__name__}: {e}", markup=False, soft_wrap=True)


def _show_samples(folder: pathlib.Path, console: Console) -> None:
    samples = read_samples(folder)
    if not samples.groups:
        return
    found = pairs(samples, limit=NUM_SAMPLES)
    if found:
        console.print(f"first and last responses to {len(found)} problems:")
        samples_view.show_pairs(console, found)
    else:
        chosen, _ = choose(samples, Query(limit=NUM_SAMPLES))
        samples_view.show(console, chosen)
    console.print(f"samples      {_python()} -m launch.tools.samples --run_dir={folder}", markup=False, soft_wrap=True)


def _write_report(folder: pathlib.Path, console: Console) -> None:
    target = RunFolder(folder).report
    try:
        from launch.tools.report.build import write_report
    except ImportError:
        said = f"{_python()} -m launch.tools.report --run_dir={folder} (requires the extra `report`)"
    else:
        said = f"{target}   ({write_report([folder], target) / 1e6:.1f} MB; open it in a browser)"
    console.print(f"report       {said}", markup=False, soft_wrap=True)


def _python() -> str:
    """Returns the interpreter's path, relative to the working directory if it is below it."""
    path = pathlib.Path(sys.executable)
    return str(path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path)
