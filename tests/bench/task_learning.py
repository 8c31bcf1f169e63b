"""Does it learn what takes several turns, a tool, or a program? Three presets at tiny size, three seeds each.

    python -m tests.bench.task_learning [--seeds=0,1,2] [--dir=FOLDER]

The main job, once for each, one after the other: environments in processes of their own, programs in sandboxes, real
vLLM. A finished run of the same code stays in its folder and is taken from there, so the bench may be stopped and go
on. Writes `results/task_learning.{json,md}`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, get_args

from absl import app, flags

from bridge.types import Verdict
from configs.run_folder import RunFolder
from launch import code_tasks
from learner.metrics import read_rows
from tests.bench.job import PROJECT, run_job
from tests.bench.rig import report

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_DIR = flags.DEFINE_string("dir", str(PROJECT / "runs" / "bench-task-learning"), "Where the runs go, and stay.")

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
        verdicts={v: n for v in (*get_args(Verdict), "unjudged") if (n := _total(steps, f"verdicts/{v}"))},
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
    summary = run_job(f"configs/{PRESETS[task]}.py", overrides, folder, reuse=True)
    return run_of(task, seed, summary, list(read_rows(RunFolder(folder).metrics)))


def _functions(root: pathlib.Path) -> pathlib.Path:
    file = root / "code_tasks.jsonl"
    if not file.is_file():
        root.mkdir(parents=True, exist_ok=True)
        code_tasks.write(file, num=20_000, seed=0)
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


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    runs: list[Run] = []
    for task in PRESETS:
        for seed in map(int, _SEEDS.value):
            runs.append(play(task, seed, pathlib.Path(_DIR.value).absolute()))
            print(f"{task} {seed}: {runs[-1].held_out[0][1]:.3f} -> {runs[-1].held_out[-1][1]:.3f}", flush=True)
    values = values_of(runs)
    report.finish(
        "task_learning",
        title="Learning: several turns, a tool, programs",
        about=[
            "`python -m tests.bench.task_learning`: the presets `tiny_guess` (a number to find by higher and lower), "
            "`tiny_calculator` (a tool that works out what the model can't) and `tiny_code` (functions, judged by test "
            "cases in sandboxes), each the main job with real vLLM in float32. Held-out problems are sampled at "
            "temperature 1 by the engine that serves the policy: 128 of the environments, 64 of the functions, so a "
            "value has a standard error of some 0.04 and 0.06. Turns are the last evaluation's mean. Verdicts are of "
            "the whole run; an environment rewards by itself, so that no verifier is asked.",
        ],
        table=table_of(runs),
        remarks=[
            "The small model is the same for all seeds; a seed draws the problems, their order and the sampling. "
            "Settings are the first that were tried."
        ],
        values=values,
        aims={key: report.Aim(value=value, aim=AIM_GAIN).to_json() for key, value in values.items()},
        data={"runs": [dataclasses.asdict(run) for run in runs]},
        figure=False,
        beside="the main job: an engine, its actor, the learner, environments or sandboxes",
    )


if __name__ == "__main__":
    app.run(main)
