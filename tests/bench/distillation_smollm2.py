"""Does SmolLM2-135M learn on-policy from a teacher that was trained here? Against RL and SFT at the same samples.

    python -m tests.bench.distillation_smollm2 [--only=distilled,forward_kl,rl,sft] [--dir=FOLDER] [--small]

Sums and differences of numbers below a hundred. The teacher is the model of the whole supervised warm start of the
recipe `arithmetic_smollm2` (400 updates), the student that of a tenth of it (40). From the student's model, for 20
updates of 64 samples: `distilled` has the teacher alone (loss.advantage=none, loss.teacher_coef=1), `forward_kl` the
teacher alone by its distributions (loss.teacher_divergence=forward_kl), `rl` the reward alone, all by the recipe's own
settings; `sft` goes on with the warm start's settings on 1,280 other worked answers. Held-out reward is greedy, on 256
problems, three quarters of them in wordings that are not trained: its standard error is at most 0.03. `sft` has no
point between start and end. Seconds of an update are those of the learner, with the teacher's forward pass. One seed. A
finished run of the same code is taken from its folder.
"""

import pathlib
from typing import Any

from absl import app

from configs.overrides import load_preset
from configs.run_folder import RunFolder
from tests.bench.distillation import fields_of
from tests.bench.harness import result, runs

RECIPE = "arithmetic_smollm2"
CASES = ("distilled", "forward_kl", "rl", "sft")
STUDENT_UPDATES, NUM_UPDATES, EVAL_EVERY, OTHER_ORDER = 40, 20, 5, 100
COLUMNS = {
    "run": "{name}",
    "held-out reward by update": "{curve}",
    "gain": "{gain:+.3f}",
    "samples": "{samples:.0f}",
    "KL to the teacher as in the loss, nats per token, start and end": "{teacher_kl}",
    "learner, s an update": "{train_s:.2f}",
    "wall, s": "{wall_s:.0f}",
}


def warm_start(
    name: str, num_updates: int, fields: dict[str, object], root: pathlib.Path
) -> tuple[pathlib.Path, float, runs.Ran]:
    """Returns the model of a supervised run, its held-out reward, and the run."""
    folder = root / name
    overrides = {**fields, "run.num_updates": num_updates, "evaluation.num_problems": 256}
    ran = runs.run_job(f"{RECIPE}:sft", overrides, folder, command="launch.sft")
    arguments = [f"--run_dir={folder}", f"--max_tokens={load_preset(RECIPE).sampling.max_response_tokens}"]
    reward = runs.held_out_reward(arguments, folder / "reward.json", temperature=0.0)
    print(f"{name}: {reward:.3f} after {num_updates} updates", flush=True)
    return RunFolder(folder).model(num_updates), reward, ran


def play(case: str, teacher: pathlib.Path, fields: dict[str, object], root: pathlib.Path) -> dict[str, Any]:
    """Returns the row of a run that samples from the student."""
    ran = runs.run_job(RECIPE, {**fields, **fields_of(case, teacher)}, root / case)
    steps = ran.of_kind("step")
    kl = [f"{step['teacher_kl']:.3f}" for step in (steps[0], steps[-1])] if case != "rl" else []
    return runs.row_of(case, ran) | {"teacher_kl": ", ".join(kl), "train_s": runs.mean(steps, "time/train_s")}


def play_sft(fields: dict[str, object], start: float, num_samples: float, root: pathlib.Path) -> dict[str, Any]:
    """Returns the row of supervised fine-tuning on as many rows as the others sample."""
    num_updates = round(num_samples) // load_preset(f"{RECIPE}:sft").sft.rows_per_update
    _, end, ran = warm_start("sft", num_updates, fields, root)
    steps = ran.of_kind("step")
    return {
        "name": "sft",
        "curve": f"0: {start:.2f}, end: {end:.2f}",
        "end": end,
        "gain": end - start,
        "samples": sum(row["sequences"] for row in steps),
        "teacher_kl": "",
        "train_s": runs.mean(steps, "time/train_s"),
        "wall_s": ran.seen["wall_s"],
    }


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    cases, root = runs.chosen(CASES), runs.folder_of("distillation-smollm2")
    is_small = result.SMALL.value
    fields = runs.prepare_smollm2(root / "data")
    teacher, of_teacher, _ = warm_start("teacher", 4 if is_small else 400, fields, root)
    student, start, _ = warm_start("student", 2 if is_small else STUDENT_UPDATES, fields, root)
    fields |= {"model.path": student, "run.seed": OTHER_ORDER}
    num_updates = 2 if is_small else NUM_UPDATES
    streamed = fields | {
        "run.num_updates": num_updates,
        "evaluation.every_n_steps": 1 if is_small else EVAL_EVERY,
        "checkpoint.every_n_steps": num_updates,
    }
    rounds = load_preset(RECIPE).rounds
    num_samples = num_updates * rounds.groups_per_update * rounds.samples_per_group
    rows = []
    for case in cases:
        rows.append(
            play_sft(fields, start, num_samples, root) if case == "sft" else play(case, teacher, streamed, root)
        )
        print(f"{case}: {rows[-1]['curve']}", flush=True)
    values = {"reward_teacher": of_teacher, "reward_student": start}
    for row in rows:
        values |= {f"{name}_{row['name']}": row[name] for name in ("end", "gain")}
    result.finish(
        "distillation_smollm2",
        __doc__,
        values=values,
        aims={f"gain_{case}": result.at_least(0.1, "ours") for case in ("distilled", "forward_kl")},
        rows=rows,
        columns=COLUMNS,
        beside=runs.MAIN_JOB,
        is_whole=len(cases) == len(CASES),
    )


if __name__ == "__main__":
    app.run(main)
