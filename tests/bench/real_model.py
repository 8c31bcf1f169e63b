"""Does a base model reach a result in minutes? SmolLM2-135M-Instruct, warm start and RL, on this machine's cores.

    python -m tests.bench.real_model [--seeds=0,1] [--only=pipelinerl,rolloutpipe] [--dir=FOLDER]

The recipe `arithmetic_smollm2`: sums and differences of numbers below a hundred in the model's chat template, first
`launch.sft` on worked answers, then `launch.local` with each preset from the warm model, 20 minutes of training in all.
The recipe's own settings, but that these minutes end a run and every publish is probed. Reward 1 is a response whose
last number is right (`math`, `answer_in=number`), on 256 held-out pairs of numbers, three quarters of them in three
kinds of question that are not trained, by greedy decoding in the engine that serves the policy (a value has a standard
error of 0.03 at most). What counts is the last evaluation whose weights were made within the minutes;
evaluations and probes are in those minutes, starting and ending are not; each run's first compilation is.

Engine tokens/s are response tokens trained a second of training, beside the learner; learner tokens/s are prompt and
response tokens a second of its computing. Memory is the sum of the peaks (VmHWM) of each role's processes; what they
share counts in each. The model comes from PyPI (`launch.tools.get_model`), once. A finished run of the same code stays
in its folder and is taken from there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import app

from configs.overrides import load_preset
from configs.run_folder import RunFolder
from tests.bench.harness import result, runs

RECIPE = "arithmetic_smollm2"
PRESETS = ("pipelinerl", "rolloutpipe")
MINUTES = 20.0
"""Of training in all: supervised and by reinforcement."""
AIM = 0.9
"""Held-out reward."""
OTHER_ORDER = 100
"""Difference of the seeds of both parts: with the same, reinforcement begins with the rows of the warm start."""
OVERRIDES: Mapping[str, object] = {
    "run.num_updates": 10_000,  # minutes end it
    "publish.probe_every_n_publishes": 1,
    # Nothing of it is used: no restart.
    "checkpoint.every_n_steps": 10_000,
}
COLUMNS = runs.COLUMNS | {
    "warm start, min": "{warm_min:.1f}",
    "minutes to 0.9": "{minutes_to_aim:.1f}",
    "held-out reward by minute": "{by_minute}",
    "engine tokens/s": "{engine_tokens_per_s:.1f}",
    "learner tokens/s": "{learner_tokens_per_s:.0f}",
    "pause, s": "{pause_s:.2f}",
    "probes": "{num_probes}",
    "learner GiB": "{learner_peak_gib:.2f}",
    "actor GiB": "{actor_peak_gib:.2f}",
}


def row_of(preset: str, seed: int, ran: runs.Ran, *, warm_s: float) -> dict[str, Any]:
    """Returns the row of what was within the minutes, of which the warm start took `warm_s` seconds.

    An evaluation counts if the newest weights that answered it were made within them. Raises RuntimeError if too little
    is within them.
    """
    bound_s = MINUTES * 60 - warm_s
    until = runs.training_s(ran.rows)
    steps = [row for row in ran.of_kind("step") if until[row["step"]] <= bound_s]
    evals = [r for r in ran.of_kind("eval") if until.get(int(r["eval/last_version"]), bound_s + 1) <= bound_s]
    probes = ran.of_kind("probe")
    if len(evals) < 2 or not steps or not probes:
        raise RuntimeError(
            f"{preset}: {len(steps)} steps, {len(evals)} evaluations and {len(probes)} probes within "
            f"{bound_s / 60:.1f} minutes of training; expected one, two and one at least"
        )
    total_s = until[steps[-1]["step"]]
    minutes = [((warm_s + until[int(row["eval/last_version"])]) / 60, row["eval/reward"]) for row in evals]
    return runs.row_of(
        f"{preset} {seed}",
        dataclasses.replace(ran, rows=[*steps, *evals, *probes]),
        preset=preset,
        seed=seed,
        warm_min=warm_s / 60,
        minutes_to_aim=next((minute for minute, reward in minutes if reward >= AIM), None),
        by_minute=", ".join(f"{minute:.1f}: {reward:.2f}" for minute, reward in minutes),
        engine_tokens_per_s=sum(row["tokens"] for row in steps) / total_s,
        learner_tokens_per_s=sum(row["real_tokens"] for row in steps) / sum(row["time/train_s"] for row in steps),
    )


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    presets, root = runs.chosen(PRESETS), runs.folder_of("real-model")
    files = runs.prepare_smollm2(root / "data")
    base = [f"--config={RECIPE}", f"--model={files['model.path']}"]
    base += [f"--config.{name}={files[name]}" for name in ("prompts.path", "prompts.eval_path")]
    values, rows = {"reward_base": runs.held_out_reward(base, root / "base.json", temperature=0.0)}, []
    for seed in map(int, runs.SEEDS.value if runs.SEEDS.present else ["0", "1"]):
        files["run.seed"] = seed
        warm = root / f"sft-{seed}"
        ran = runs.run_job(f"{RECIPE}:sft", files, warm, command="launch.sft")
        warm_s = max(runs.training_s(ran.rows).values())
        model = RunFolder(warm).model(load_preset(f"{RECIPE}:sft").run.num_updates)
        for preset in presets:
            overrides = {**OVERRIDES, **files, "model.path": model, "run.seed": seed + OTHER_ORDER}
            folder, bound_s = root / f"{preset}-{seed}", MINUTES * 60 - warm_s
            ran = runs.run_job(f"{RECIPE}:{preset}", overrides, folder, bound_s=bound_s)
            rows.append(row_of(preset, seed, ran, warm_s=warm_s))
            print(f"{preset} {seed}: {rows[-1]['by_minute']}", flush=True)
    values |= {f"reward_{preset}": min(r["end"] for r in rows if r["preset"] == preset) for preset in presets}
    values |= {
        "reward_warm": min(row["start"] for row in rows),
        "max_abs_dlogprob": max(row["max_abs_dlogprob"] for row in rows),
        "wall_min": max(row["wall_s"] for row in rows) / 60,
    }
    result.finish(
        "real_model",
        __doc__,
        values=values,
        aims={
            **{f"reward_{preset}": result.at_least(AIM, "ours") for preset in PRESETS},
            "max_abs_dlogprob": result.at_most(1e-4, "at which an actor of float32 is fenced"),
        },
        rows=rows,
        columns=COLUMNS,
        beside=runs.MAIN_JOB,
    )


if __name__ == "__main__":
    app.run(main)
