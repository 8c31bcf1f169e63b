"""Does it learn what takes several turns, a tool, or a program? Three presets at tiny size, three seeds each.

    python -m tests.bench.task_learning [--seeds=0,1,2] [--dir=FOLDER]

`tiny_guess` (a number to find by higher and lower), `tiny_calculator` (a tool that works out what the model can't) and
`tiny_code` (functions, judged by test cases in sandboxes), each the main job. Held-out problems are sampled at
temperature 1 by the engine that serves the policy: 128 of the environments, 64 of the functions, so a value has a
standard error of some 0.04 and 0.06. Turns are the last evaluation's mean. Verdicts are of the whole run; an
environment rewards by itself, so that no verifier is asked. The small model is the same for all seeds; a seed draws the
problems, their order and the sampling. Settings are the first that were tried. A finished run of the same code is taken
from its folder.
"""

import pathlib
from typing import Any, get_args

from absl import app

from bridge.rollout_types import Verdict
from configs.tasks import catalog
from tests.bench.harness import result, runs

PRESETS = {"guess": "tiny_guess", "calculator": "tiny_calculator", "code": "tiny_code"}


def play(task: str, seed: int, root: pathlib.Path) -> dict[str, Any]:
    """Returns the row of a run."""
    overrides: dict[str, object] = {"run.seed": seed}
    if task == "code":
        if not (root / "train.jsonl").is_file():
            catalog.write_files("code", root, seed=0)
        overrides["prompts.path"] = root / "train.jsonl"
    ran = runs.run_job(PRESETS[task], overrides, root / f"{task}-{seed}")
    steps, evals = ran.of_kind("step"), ran.of_kind("eval")
    counts = {v: round(sum(row.get(f"verdicts/{v}", 0.0) for row in steps)) for v in (*get_args(Verdict), "unscored")}
    return runs.row_of(
        f"{task} {seed}",
        ran,
        task=task,
        turns=evals[-1].get("eval/turns", 1.0),
        verdicts={verdict: count for verdict, count in counts.items() if count},
    )


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    rows = []
    for task in PRESETS:
        for seed in map(int, runs.SEEDS.value):
            rows.append(play(task, seed, runs.folder_of("task-learning")))
            print(f"{rows[-1]['name']}: {rows[-1]['start']:.3f} -> {rows[-1]['end']:.3f}", flush=True)
    values = {f"min_gain_{task}": min(r["gain"] for r in rows if r["task"] == task) for task in PRESETS}
    result.finish(
        "task_learning",
        __doc__,
        values=values,
        aims=dict.fromkeys(values, result.at_least(0.2, "ours")),
        rows=rows,
        columns=runs.COLUMNS | {"turns": "{turns:.2f}", "verdicts": "{verdicts}"},
        beside=f"{runs.MAIN_JOB}, with environments or sandboxes",
    )


if __name__ == "__main__":
    app.run(main)
