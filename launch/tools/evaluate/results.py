"""Results of an evaluation: a JSON file, and a table on the terminal."""

import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge import weight_types
from bridge.files import replace_file
from bridge.rollout_types import Group
from configs.run_folder import RunFolder
from launch.cli import one_line
from launch.terminal import make_console
from launch.tools.evaluate.eval_runner import EvalProblems
from launch.tools.out_file import write_out_file
from learner.evaluation import eval_summary
from learner.evaluation.eval_summary import summarize
from learner.evaluation.pinned_requests import problem_number
from learner.metrics.sample_record import Decode, Json


def results_of(
    problems: EvalProblems,
    groups: Mapping[str, Sequence[Group]],
    *,
    decode: Decode,
    show: int,
    head: Mapping[str, Any],
) -> Json:
    """Returns the results as JSON: `head`, and per set its settings, estimates and some responses.

    A set without scored problems has `problems` 0 and no metrics.
    """
    sets: list[Json] = []
    for one in problems.sets:
        there = groups.get(one.name, ())
        asked = eval_summary.asked_of(one)
        if not there:
            sets.append(asked | {"k": one.config.k, "problems": 0, "left_out": len(one.problems), "metrics": {}})
            continue
        summary = summarize(
            there,
            num_problems=len(one.problems),
            pass_reward=one.config.pass_reward or 0.0,
            reads_answers=one.reads_answers,
        )
        sets.append(
            asked
            | eval_summary.result_of(summary)
            | {
                "rows_set_aside": len(one.bad),
                "samples": eval_summary.samples_of(
                    dict(enumerate(one.problems)), {problem_number(g.ticket_id): g for g in there}, decode, limit=show
                ),
            }
        )
    made = {
        "format": eval_summary.FORMAT,
        "time_s": round(time.time(), 3),
        "sluice": weight_types.SLUICE,
        "vllm": weight_types.VLLM,
    }
    return made | dict(head) | {"sets": sets}


def write(found: Json, out: pathlib.Path) -> None:
    """Writes the results file atomically; raises OSError if the write failed."""
    write_out_file(out, json.dumps(found, indent=2, allow_nan=False) + "\n")


def keep_beside(found: Json, run: RunFolder) -> None:
    """Writes a checkpoint's results into the run's folder as well, where `launch.tools.report` finds them.

    A failed write is only reported: the results are already in the user's file.
    """
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    try:
        run.evaluated.mkdir(exist_ok=True)
        replace_file(run.evaluated / f"{found['step']}-{round(found['time_s'] * 1000)}.json", text.encode())
    except OSError as e:
        print(f"not in {run.evaluated}: {one_line(e)}; launch.tools.report takes --results", file=sys.stderr)
    else:
        print(f"report       python -m launch.tools.report --run_dir={run.path}")


def print_table(found: Json, console: Console | None = None) -> None:
    """Prints one row per estimate, then the unscored problems and notes."""
    console = console or make_console()
    table = Table(title=pathlib.Path(found["model"]).name)
    table.add_column("set", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for name in ("value", "+-", "problems", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found["sets"]:
        shown, num_samples = one["set"], one["k"] * one["problems"]
        if not one["metrics"]:
            table.add_row(shown, "-", "-", "-", "0", "-")
        for metric, estimate in one["metrics"].items():
            stderr = "-" if estimate["stderr"] is None else f"{estimate['stderr']:.4f}"
            cut = f"{one['truncated'] / num_samples:.1%}" if shown else ""
            table.add_row(shown, metric, f"{estimate['value']:.4f}", stderr, str(one["problems"]) if shown else "", cut)
            shown = ""
    console.print(table)
    for one in found["sets"]:
        if one["left_out"]:
            console.print(f"{one['set']}: {one['left_out']} problems not scored; see the log")
        for note in one.get("notes", ()):
            console.print(f"{one['set']}: {note}", soft_wrap=True)
