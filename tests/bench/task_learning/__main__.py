"""Does it learn what takes several turns, a tool, or a program? Three presets at tiny size, three seeds each.

    python -m tests.bench.task_learning [--seeds=0,1,2] [--dir=FOLDER]

The main job, once for each, one after the other: environments in processes of their own, programs in sandboxes, real
vLLM. A finished run of the same code stays in its folder and is taken from there, so the bench may be stopped and go
on. Writes `results/task_learning.{json,md}`.
"""

import dataclasses
import pathlib

from absl import app, flags

from tests.bench.job import PROJECT
from tests.bench.rig import report
from tests.bench.task_learning.runs import AIM_GAIN, PRESETS, Run, play, table_of, values_of

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_DIR = flags.DEFINE_string("dir", str(PROJECT / "runs" / "bench-task-learning"), "Where the runs go, and stay.")


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
