"""How fast and how lean is one GRPO update (forward, backward, AdamW), side by side with what others use?

    python -m tests.bench.learner [--quick] [--profile] [--batches=seed0,full] [--sides=ours,torch_packed]

Sides, each a process of its own on the same two cores, float32, all from one folder of weights:
  ours          `TrainStep.accumulate` and `TrainStep.apply` with the default configuration, packed
  torch_packed  PyTorch with transformers, packed under a block-causal mask, or where all sequences are as long one a
                row under SDPA's own causal mask; nothing recomputed, fused AdamW
  tunix_padded  google-tunix from PyPI as it ships: one sequence a row of 128 + 384 tokens
  tunix_packed  google-tunix with its sequence packing

Two models: a Qwen3 of 16M parameters, and one of SmolLM2-135M's shape, on which tunix is not timed (batch `real`: 32
samples of 71 tokens, 24 of them scored, eight of each prompt, which ours computes once; `real_apart`: of 32 prompts).
The workload is `tests/bench/peers/workload.py` and `models.py`, the rules of timing `tests/bench/peers/race.py`, how
memory is read `tests/bench/peers/serve.py`. Before a batch is timed every side shows the loss and the gradient norm of
the first update and the loss after it; a peer whose numbers are wrong is timed and marked, and if ours are the bench
fails. A ratio is a peer's seconds over ours. The aims of the small model are about the median over the three seeds.

Peers' environments are made at the first run (minutes; `peers/venvs.py`). A whole run takes about half an hour, and
writes `results/learner.md`; --quick takes one seed and two rounds and writes nothing.
"""

import json
import logging
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

from tests.bench.learner import table
from tests.bench.learner.aims import RATIOS, aims_of, batches_of, each_of
from tests.bench.peers import models, venvs, workload
from tests.bench.peers.race import ROOT, Entry, Process, check, summary, timings

_QUICK = flags.DEFINE_bool("quick", False, "One seed, two rounds, few updates; for development. Writes no results.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed rounds after the warm-up.", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", list(workload.BATCHES), "Which batches.")
_SIDES = flags.DEFINE_list("sides", ["ours", "torch_packed", "tunix_padded", "tunix_packed"], "Which sides.")
_PROFILE = flags.DEFINE_bool("profile", False, "Also print where our update's time goes.")
_RESULTS = flags.DEFINE_string(
    "results", str(pathlib.Path(__file__).parents[1] / "results/learner.md"), "The table's file."
)


def entries(names: list[str]) -> list[Entry]:
    """The sides of those names; makes their environments."""
    peer = "tests.bench.peers"
    known = {
        "ours": ("", "tests.bench.learner.ours", ()),
        "torch_packed": ("torch", f"{peer}.torch_peer", ()),
        "tunix_padded": ("tunix", f"{peer}.tunix_peer", ("--layout=padded",)),
        "tunix_packed": ("tunix", f"{peer}.tunix_peer", ("--layout=packed",)),
    }
    if unknown := set(names) - set(known):
        raise ValueError(f"--sides: got {sorted(unknown)}, wanted some of {sorted(known)}")
    if not {"ours", "torch_packed"} <= set(names):
        raise ValueError("--sides needs ours and torch_packed, which the numbers of all others are compared with")
    made = []
    for name in names:
        environment, module, args = known[name]
        python = venvs.ensure(environment) if environment else pathlib.Path(sys.executable)
        made.append(Entry(name=name, python=python, module=module, args=args))
    return made


def race(batches: list[str], sides: list[Entry], folder: pathlib.Path, *, rounds: int) -> dict[str, dict]:
    """For every batch: each side's numbers, memory and time."""
    used = {workload.BATCHES[name].model for name in batches}
    for model in used:
        models.write_model(model, folder / model)
    results: dict[str, dict] = {}
    # One model after the other: processes that have let go of one would still hold its memory.
    for model in sorted(used, key=list(models.MODELS).index):
        able = [side for side in sides if model == models.SMALL or not side.name.startswith("tunix")]
        processes = [Process(side, folder, folder / f"{side.name}-{model}.log") for side in able]
        try:
            for name in (n for n in batches if workload.BATCHES[n].model == model):
                results[name] = one_batch(name, processes, rounds=rounds)
        finally:
            for process in processes:
                process.close()
    return results


def one_batch(name: str, processes: list[Process], *, rounds: int) -> dict[str, dict]:
    """Each side's numbers, memory and time on a batch.

    Raises:
      RuntimeError: our numbers are not PyTorch's.
    """
    checks = check(processes, name, reference="torch_packed")
    if not checks["ours"]["right"]:
        raise RuntimeError(f"{name}: our numbers are not PyTorch's; {table.numbers(checks)}")
    print(f"{name}: {table.numbers(checks)}", flush=True)
    times = timings(processes, rounds=rounds)
    result = {side: checks[side] | summary(times[side]) for side in times}
    print(table.batch_line(name, result), flush=True)
    return result


def last_line_of(module: str, *args: str) -> dict:
    """Runs a module of the bench in a process of its own; the JSON that it ends with.

    Raises:
      RuntimeError: it failed; shows what it said.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def profiles(folder: pathlib.Path, batches: list[str]) -> list[dict]:
    """Where our update's time goes: on the first batch of each model."""
    first = {workload.BATCHES[name].model: name for name in reversed(batches)}
    return [last_line_of("tests.bench.learner.profile", str(folder), name) for name in first.values()]


def values_of(results: dict[str, dict], shapes: dict) -> dict:
    """Everything measured, flat."""
    batches = {name: workload.make_batch(name) for name in results}
    main = [name for name in workload.MAIN if name in results] or list(results)
    values: dict = {"fill": statistics.median(batches[n].fill for n in main)}
    for key, peer in RATIOS.items():
        of_batch = {n: r[peer]["s"] / r["ours"]["s"] for n, r in results.items() if peer in r}
        values |= {f"{key}_{n}": of_batch[n] for n in each_of(key) if n in of_batch}
        if found := [of_batch[n] for n in batches_of(key) if n in of_batch]:
            values[key] = statistics.median(found)
    for name, sides in results.items():
        values[f"fill_{name}"] = batches[name].fill
        for side, r in sides.items():
            values[f"tokens_per_s_{side}_{name}"] = batches[name].num_real_tokens / r["s"]
    # The first batch's: only there is a process fresh.
    first = next(iter(results.values()))
    values["peak_over_start_gb"] = first["ours"]["peak_over_start_gb"]
    for side, r in first.items():
        values[f"peak_over_start_gb_{side}"] = r["peak_over_start_gb"]
        values[f"peak_over_empty_gb_{side}"] = r["peak_over_empty_gb"]
    values["numbers_wrong"] = sorted({s for sides in results.values() for s, r in sides.items() if not r["right"]})
    values["disturbed"] = sorted(f"{s}_{n}" for n, sides in results.items() for s, r in sides.items() if r["disturbed"])
    return values | shapes


def main(argv: list[str]) -> None:
    """Runs all, prints the tables and the JSON line."""
    del argv
    logging.basicConfig(level=logging.INFO)
    quick = _QUICK.value
    batches = _BATCHES.value if not quick or flags.FLAGS["batches"].present else ["seed0"]
    if unknown := set(batches) - set(workload.BATCHES):
        raise ValueError(f"--batches: got {sorted(unknown)}, wanted some of {sorted(workload.BATCHES)}")
    rounds = 2 if quick and not flags.FLAGS["rounds"].present else _ROUNDS.value
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as temporary:
        folder = pathlib.Path(temporary)
        results = race(batches, entries(_SIDES.value), folder, rounds=rounds)
        shapes = last_line_of("tests.bench.learner.shapes", *(["--quick"] if quick else []))
        profile = profiles(folder, batches) if _PROFILE.value else []
    values = values_of(results, shapes)
    aims = aims_of(values)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    text = table.markdown(results, values, aims, profile, machine=machine, rounds=rounds)
    print(text)
    if not quick:
        path = pathlib.Path(_RESULTS.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(json.dumps({"bench": "learner", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
