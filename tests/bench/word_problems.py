"""What does SmolLM2-135M-Instruct learn of word problems in two hours? Warm start and RL, on this machine's cores.

    python -m tests.bench.word_problems [--minutes=90] [--dir=FOLDER] [--small]

The recipe `gsm_smollm2`: first `launch.sft` on the solutions of chains of one to three steps, then `launch.local` with
`pipelinerl` on the chains and on templates of GSM-Symbolic, which come without solutions, for at most the given minutes
of training. The settings are the recipe's own. Reward 1 is a response whose last number is right (`math`,
`answer_in=number`). Rewards by source are greedy, on 128 held-out problems each, of the base model, of the warm start
and of the newest checkpoint: a standard error is at most 0.045. One seed. A finished run of the same code stays in its
folder and is taken from there.
"""

import pathlib
from typing import Any

from absl import app, flags

from configs.overrides import load_preset
from configs.run_folder import RunFolder
from configs.tasks import catalog
from tests.bench.harness import result, runs

RECIPE = "gsm_smollm2"
CHAINS = ("one_step", "two_steps", "three_steps")
TASK = "gsm_symbolic"
NUM_PROBLEMS = 128
COLUMNS = {
    "model": "{name}",
    "updates": "{num_steps}",
    "one step": "{one_step:.3f}",
    "two steps": "{two_steps:.3f}",
    "three steps": "{three_steps:.3f}",
    "GSM-Symbolic": "{gsm_symbolic:.3f}",
    "training, min": "{training_min:.1f}",
    "samples": "{samples:.0f}",
    "held-out reward of all sources by update": "{curve}",
    "mean lag": "{lag_mean:.2f}",
    "wall, s": "{wall_s:.0f}",
}
_MINUTES = flags.DEFINE_float("minutes", 90.0, "Minutes of training by reinforcement, at most.")


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    root, is_small = runs.folder_of("word-problems"), result.SMALL.value
    num_problems = 4 if is_small else NUM_PROBLEMS
    data = root / "data"
    base = runs.prepare_smollm2(data)["model.path"]
    catalog.write_files("word_problems", data, seed=0)
    sets = [f"--prompts={name}={data / name}_held_out.jsonl" for name in CHAINS] + [f"--prompts={TASK}=task:{TASK}"]
    sets += [f"--config.evaluation.sets.{name}.num_problems={num_problems}" for name in (*CHAINS, TASK)]
    sets += [f"--max_tokens={load_preset(RECIPE).sampling.max_response_tokens}"]
    files: dict[str, object] = {}
    for name in CHAINS:
        files[f"prompts.mixture.{name}.path"] = data / f"{name}.jsonl"
        files[f"prompts.mixture.{name}.eval_path"] = data / f"{name}_held_out.jsonl"

    def rewards(name: str, out: pathlib.Path, *model: str) -> dict[str, Any]:
        found = runs.evaluate([*model, *sets], out, temperature=0.0)
        by_set = {one["set"]: runs.reward_of(one) for one in found["sets"]}
        print(f"{name}: {by_set}", flush=True)
        return {"name": name, "num_steps": found["step"], **by_set}

    rows = [rewards("base", root / "base.json", f"--config={RECIPE}", f"--model={base}")]
    num_updates = 4 if is_small else load_preset(f"{RECIPE}:sft").run.num_updates
    warm, folder = root / "sft", root / "rl"
    overrides = files | {"model.path": base, "run.num_updates": num_updates}
    ran = runs.run_job(f"{RECIPE}:sft", overrides, warm, command="launch.sft")
    rows.append(rewards("supervised", warm / "reward.json", f"--run_dir={warm}") | _cost_of(ran))
    overrides = files | {"model.path": RunFolder(warm).model(num_updates)}
    if is_small:
        overrides |= {"run.num_updates": 2, "evaluation.num_problems": 8}
    ran = runs.run_job(RECIPE, overrides, folder, bound_s=_MINUTES.value * 60)
    rows.append(runs.row_of("rl", ran) | rewards("rl", folder / "reward.json", f"--run_dir={folder}") | _cost_of(ran))
    values = {f"{name}_{row['name']}": row[name] for row in rows for name in (*CHAINS, TASK)}
    result.finish(
        "word_problems",
        __doc__,
        values=values,
        aims={f"{name}_rl": result.at_least(rows[1][name], "the warm start") for name in (*CHAINS, TASK)},
        rows=rows,
        columns=COLUMNS,
        beside=runs.MAIN_JOB,
    )


def _cost_of(ran: runs.Ran) -> dict[str, Any]:
    steps = ran.of_kind("step")
    return {
        "training_min": max(runs.training_s(ran.rows).values()) / 60,
        "samples": sum(row["sequences"] for row in steps),
        "wall_s": ran.seen["wall_s"],
    }


if __name__ == "__main__":
    app.run(main)
