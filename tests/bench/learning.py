"""Does it learn? Presets `tiny` and `pipelinerl` at tiny size, five seeds each.

`python -m tests.bench.learning [--seeds=0,1,2,3,4] [--dir=FOLDER]`

The main job ten times, one after the other: sums of three one-digit numbers, float32, 256 held-out problems sampled at
temperature 1 by the engine that serves the policy, so a start or end value has a standard error of about 0.03. Wall
time counts everything from the command on: engine start, compilation, training, evaluation. Step size, samples per
update and number of updates of `tiny` were chosen on another seed (10). A finished run of the same code is taken from
its folder.
"""

from absl import app

from tests.bench.harness import result, runs
from tests.bench.harness.figure import curves

PRESETS = {"tiny": "tiny", "pipelinerl": "pipelinerl:tiny"}


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    root = runs.folder_of("learning")
    rows = []
    for seed in map(int, runs.SEEDS.value):
        for preset, config in PRESETS.items():
            name = f"{preset}_{seed}"
            ran = runs.run_job(config, {"run.seed": seed}, root / name)
            rows.append(runs.row_of(name, ran))
            print(f"{name}: {rows[-1]['start']:.3f} -> {rows[-1]['end']:.3f}", flush=True)
    ends = {row["name"]: row["end"] for row in rows}
    of_tiny = [end for name, end in ends.items() if name.startswith("tiny_")]
    if (folder := result.results_folder()) is not None:
        lines = {preset: [r["held_out"] for r in rows if r["name"].startswith(f"{preset}_")] for preset in PRESETS}
        curves(folder / "learning.png", lines)
    result.finish(
        "learning",
        __doc__,
        values=ends | {"min_end_tiny": min(of_tiny), "max_wall_s": max(row["wall_s"] for row in rows)},
        aims={
            "min_end_tiny": result.at_least(0.9, "ours"),
            "max_wall_s": result.at_most(600.0, "ours"),
        },
        rows=rows,
        columns=runs.COLUMNS,
        beside=runs.MAIN_JOB,
        figure=True,
    )


if __name__ == "__main__":
    app.run(main)
