"""On-policy distillation against RL and SFT at the same samples; the teacher is the same tiny model after RL.

    python -m tests.bench.distillation [--seeds=0,1,2] [--dir=FOLDER] [--small]

The teacher is the model of a whole run of `tiny` on another seed (10). Each student starts from the small model that
`tiny` starts from, for 200 updates, and sees the same prompts and as many samples. `rl` has the reward alone,
`distilled` the teacher alone (loss.advantage=none, loss.teacher_coef=1), `both` their sum. `forward_kl` has the teacher
alone by its distributions (loss.teacher_divergence=forward_kl). `sft` learns reference answers (`launch.sft`), a row
for each sample of the others, with the rate of `sft:tiny`; no student saw the teacher's own responses. A point of a
curve is 256 held-out problems, sampled at temperature 1 by an engine: its standard error is at most 0.03. `sft` has a
point every 50 updates, of its checkpoints, the others one every 10, by the engine that serves the student. `area` is
the mean of a curve over the updates, by trapezoids. The teacher's forward passes cost the learner time, which samples
do not count. A finished run of the same code is taken from its folder.
"""

import pathlib
import statistics
from typing import Any

import numpy as np
from absl import app

from configs.overrides import load_preset
from configs.run_folder import RunFolder
from tests.bench.harness import result, runs

STREAMED = ("rl", "distilled", "forward_kl", "both")
CASES = (*STREAMED, "sft")
TEACHER_SEED = 10
COLUMNS = runs.COLUMNS | {
    "area": "{area:.3f}",
    "KL to the teacher as in the loss, nats per token, start and end": "{teacher_kl}",
    "learner, s an update": "{train_s:.2f}",
}


def fields_of(case: str, teacher: pathlib.Path) -> dict[str, object]:
    """Returns the fields of a case."""
    if case == "rl":
        return {}
    fields: dict[str, object] = {"loss.teacher_coef": 1.0, "loss.teacher_path": teacher}
    if case != "both":
        fields |= {"loss.advantage": "none"}
    return fields | ({"loss.teacher_divergence": "forward_kl"} if case == "forward_kl" else {})


def area(held_out: list[tuple[int, float]]) -> float:
    """Returns the mean of a curve over its steps."""
    steps, rewards = np.array(held_out, np.float64).T
    return float(np.trapezoid(rewards, steps) / (steps[-1] - steps[0]))


def play(
    case: str, seed: int, teacher: pathlib.Path, overrides: dict[str, object], root: pathlib.Path
) -> dict[str, Any]:
    """Returns the row of a run."""
    ran = runs.run_job("tiny", {**overrides, **fields_of(case, teacher), "run.seed": seed}, root / f"{case}-{seed}")
    steps = ran.of_kind("step")
    row = runs.row_of(f"{case} {seed}", ran, case=case)
    kl = [steps[0]["teacher_kl"], steps[-1]["teacher_kl"]]
    return row | {
        "area": area(row["held_out"]),
        "teacher_kl": "-" if case == "rl" else f"{kl[0]:.2f}, {kl[1]:.2f}",
        "train_s": runs.mean(steps, "time/train_s"),
    }


def play_sft(seed: int, num_updates: int, start: float, root: pathlib.Path) -> dict[str, Any]:
    """Returns the row of supervised fine-tuning on as many rows; `start` is the reward before."""
    rounds, every = load_preset("tiny").rounds, max(1, num_updates // 4)
    overrides: dict[str, object] = {
        "run.num_updates": num_updates,
        "run.seed": seed,
        "sft.rows_per_update": rounds.groups_per_update * rounds.samples_per_group,
        "checkpoint.every_n_steps": every,
        "checkpoint.keep": 5,
        "evaluation.every_n_steps": 0,
    }
    folder = root / f"sft-{seed}"
    ran = runs.run_job("sft:tiny", overrides, folder, command="launch.sft")
    held_out = [(0, start)]
    for step in range(every, num_updates + 1, every):
        arguments = [f"--run_dir={folder}", f"--step={step}"]
        held_out.append((step, runs.held_out_reward(arguments, folder / f"reward-{step}.json")))
    return {
        "name": f"sft {seed}",
        "case": "sft",
        "held_out": held_out,
        "curve": ", ".join(f"{step}: {reward:.2f}" for step, reward in held_out),
        "start": start,
        "end": held_out[-1][1],
        "gain": held_out[-1][1] - start,
        "area": area(held_out),
        "teacher_kl": "-",
        "num_steps": num_updates,
        "samples": sum(row["sequences"] for row in ran.of_kind("step")),
        "train_s": runs.mean(ran.of_kind("step"), "time/train_s"),
    }


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    root = runs.folder_of("distillation")
    is_small = result.SMALL.value
    of_teacher: dict[str, object] = {"run.seed": TEACHER_SEED, **({"run.num_updates": 2} if is_small else {})}
    taught = runs.run_job("tiny", of_teacher, root / "teacher")
    teacher = RunFolder(root / "teacher").model(taught.of_kind("step")[-1]["step"])
    every, num_updates = (1, 2) if is_small else (10, 200)
    overrides: dict[str, object] = {"evaluation.every_n_steps": every, "run.num_updates": num_updates}
    rows = []
    for seed in map(int, runs.SEEDS.value[:1] if is_small else runs.SEEDS.value):
        for case in STREAMED:
            rows.append(play(case, seed, teacher, overrides, root))
            print(f"{rows[-1]['name']}: {rows[-1]['curve']}", flush=True)
        rows.append(play_sft(seed, num_updates, rows[-1]["start"], root))
        print(f"{rows[-1]['name']}: {rows[-1]['curve']}", flush=True)
    values: dict[str, float] = {"teacher": taught.of_kind("eval")[-1]["eval/reward"]}
    for case in CASES:
        of_case = [row for row in rows if row["case"] == case]
        values |= {f"{name}_{case}": statistics.fmean(row[name] for row in of_case) for name in ("area", "end")}
    for case in ("distilled", "forward_kl"):
        values[f"area_gain_{case}"] = values[f"area_{case}"] - values["area_rl"]
    values["area_gain_over_sft"] = values["area_distilled"] - values["area_sft"]
    result.finish(
        "distillation",
        __doc__,
        values=values,
        aims={f"area_gain_{case}": result.at_least(0.0, "ours") for case in ("distilled", "forward_kl")},
        rows=rows,
        columns=COLUMNS,
        beside=runs.MAIN_JOB,
    )


if __name__ == "__main__":
    app.run(main)
