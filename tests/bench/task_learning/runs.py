"""One run of a task, and what the page says of it."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, get_args

from bridge.rollout_types import Verdict
from configs.run_folder import RunFolder
from launch.tools import task_files
from learner.metrics.metrics_writer import read_rows
from tests.bench.job import run_job
from tests.bench.rig import report

PRESETS = {"guess": "tiny_guess", "calculator": "tiny_calculator", "code": "tiny_code"}
AIM_GAIN = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the page says of one run."""

    task: str
    seed: int
    held_out: list[tuple[int, float]]
    """Step, mean reward."""
    num_responses: int
    turns: float
    """Of a response, mean of the last evaluation."""
    verdicts: dict[str, int]
    """How often each was said, over the run; nothing is said of an episode that no verifier judged."""
    wall_s: float

    @property
    def gain(self) -> float:
        return self.held_out[-1][1] - self.held_out[0][1]


def run_of(task: str, seed: int, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> Run:
    """From a run's summary and its metrics."""
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if "eval/reward" in row]
    return Run(
        task=task,
        seed=seed,
        held_out=[(int(step), float(reward)) for step, reward in summary["held_out"]],
        num_responses=round(sum(row["sequences"] for row in steps)),
        turns=evals[-1].get("eval/turns", 1.0),
        verdicts={v: n for v in (*get_args(Verdict), "unscored") if (n := _total(steps, f"verdicts/{v}"))},
        wall_s=summary["wall_s"],
    )


def _total(steps: list[dict[str, Any]], name: str) -> int:
    return round(sum(row.get(name, 0.0) for row in steps))


def play(task: str, seed: int, root: pathlib.Path) -> Run:
    """A run, or what is left of it."""
    overrides: dict[str, object] = {"run.seed": seed}
    if task == "code":
        overrides["prompts.path"] = _functions(root)
    folder = root / f"{task}-{seed}"
    summary = run_job(PRESETS[task], overrides, folder, reuse=True)
    return run_of(task, seed, summary, list(read_rows(RunFolder(folder).metrics)))


def _functions(root: pathlib.Path) -> pathlib.Path:
    file = root / "train.jsonl"
    if not file.is_file():
        task_files.write("code", root, seed=0)
    return file


def table_of(runs: list[Run]) -> report.Table:
    """A line a run."""
    lines = [
        [
            run.task,
            str(run.seed),
            f"{run.held_out[0][1]:.3f}",
            f"{run.held_out[-1][1]:.3f}",
            f"{run.gain:+.3f}",
            ", ".join(f"{step}: {reward:.2f}" for step, reward in run.held_out),
            str(run.num_responses),
            f"{run.turns:.2f}",
            ", ".join(f"{name} {count}" for name, count in run.verdicts.items()) or "-",
            f"{run.wall_s:.0f}",
        ]
        for run in runs
    ]
    columns = ["task", "seed", "start", "end", "gain", "by step", "responses", "turns", "verdicts", "wall, s"]
    return report.Table(columns=columns, rows=lines)


def values_of(runs: list[Run]) -> dict[str, float]:
    """Each task's smallest gain."""
    tasks = dict.fromkeys(run.task for run in runs)
    return {f"min_gain_{task}": min(run.gain for run in runs if run.task == task) for task in tasks}
