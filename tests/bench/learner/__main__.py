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
The workload is `tests/bench/peers/workload.py` and `tests/bench/peers/models.py`, the rules of timing
`tests/bench/peers/race.py`, how memory is read `tests/bench/peers/serve.py`. Before a batch is timed every side shows
the loss and the gradient norm of
the first update and the loss after it; a peer whose numbers are wrong is timed and marked, and if ours are the bench
fails. A ratio is a peer's seconds over ours. The aims of the small model are about the median over the three seeds.

Peers' environments are made at the first run (minutes; `tests/bench/peers/venvs.py`). A whole run takes about half an
hour, and writes `tests/bench/results/learner.md`; --quick takes one seed and two rounds and writes nothing.
"""

import logging
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from tests.bench.harness import page, result
from tests.bench.harness.parts import last_line_of
from tests.bench.learner.aims import AIMS, RATIOS, batches_of, each_of, without_disturbed
from tests.bench.peers import models, venvs, workload
from tests.bench.peers.race import Entry, Process, check, summary, timings

_QUICK = flags.DEFINE_bool("quick", False, "One seed, two rounds, few updates; for development. Writes no results.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed rounds after the warm-up.", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", list(workload.BATCHES), "Which batches.")
_SIDES = flags.DEFINE_list("sides", ["ours", "torch_packed", "tunix_padded", "tunix_packed"], "Which sides.")
_PROFILE = flags.DEFINE_bool("profile", False, "Also tell where our update's time goes.")
COLUMNS = {
    "batch": "{batch}",
    "real tokens": "{real_tokens}",
    "fill": "{fill:.0%}",
    "side": "{side}",
    "slots": "{slots}",
    "s": "{s:.3f}",
    "min - max": "{s_min:.3f} - {s_max:.3f}",
    "real tokens/s": "{tokens_per_s:.0f}",
    "times ours": "{over_ours:.2f}",
    "clean rounds": "{clean_rounds}/{rounds}",
    "foreign": "{foreign:.0%}",
    "loss": "{loss:.7f}",
    "gradient norm": "{grad_norm:.6f}",
    "loss after": "{loss_after:.7f}",
    "numbers right": "{right}",
    "peak over start, GB": "{peak_over_start_gb:.2f}",
    "peak over empty, GB": "{peak_over_empty_gb:.2f}",
}


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
    """Each side's numbers, memory and time on a batch. Raises RuntimeError if our numbers are not PyTorch's."""
    checks = check(processes, name, reference="torch_packed")
    if not checks["ours"]["right"]:
        raise RuntimeError(f"{name}: our numbers are not PyTorch's; {checks}")
    print(f"{name}: {checks}", flush=True)
    times = timings(processes, rounds=rounds)
    found = {side: checks[side] | summary(times[side]) for side in times}
    print(name, {side: round(r["s"], 2) for side, r in found.items()}, flush=True)
    return found


def values_of(results: dict[str, dict]) -> dict:
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
    return values


def rows_of(results: dict[str, dict]) -> list[dict[str, Any]]:
    """Returns a row for each side on each batch."""
    rows = []
    for name, sides in results.items():
        batch = workload.make_batch(name)
        for side, r in sides.items():
            rows.append(
                {
                    "batch": name,
                    "side": side,
                    "real_tokens": batch.num_real_tokens,
                    "fill": batch.fill,
                    "tokens_per_s": batch.num_real_tokens / r["s"],
                    "over_ours": r["s"] / sides["ours"]["s"],
                    **r,
                }
            )
    return rows


def profile_notes(profile: Mapping[str, Any]) -> list[str]:
    """Returns where the time of our update goes: its parts, and its longest operations."""
    least = profile["gflop"] / profile["ceiling_gflops"]
    about = (
        f"Where our update's time goes, batch {profile['batch']}: matmuls of its shapes sustain "
        f"{profile['ceiling_gflops']:.0f} GFLOP/s on two threads, so its {profile['gflop']:.0f} GFLOP take at least "
        f"{least:.2f} s; it takes {profile['update_s']:.2f} s (foreign {profile['foreign']:.0%}). Without "
        f"recomputation and padding it is {profile['model_gflop']:.0f} GFLOP."
    )
    parts = {"part": "{name}", "GFLOP": "{gflop:.1f}", "least s": "{least_s:.3f}", "traced s": "{s:.3f}"}
    top = {"s": "{s:.3f}", "calls": "{calls}", "operation": "`{name}`", "from": "{where}"}
    return [about, page.table(parts, profile["parts"]), page.table(top, profile["top"])]


def run_alone(module: str, *args: str) -> dict[str, Any]:
    """Runs a module of the bench in a process of its own, without a compilation cache."""
    env = {"OMP_NUM_THREADS": "2", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return last_line_of(f"tests.bench.learner.{module}", *args, env=env, timeout_s=1800.0)


def main(argv: list[str]) -> None:
    """Runs all, prints the tables and the JSON line."""
    del argv
    logging.basicConfig(level=logging.INFO)
    quick = _QUICK.value
    batches = _BATCHES.value if not quick or _BATCHES.present else ["seed0"]
    if unknown := set(batches) - set(workload.BATCHES):
        raise ValueError(f"--batches: got {sorted(unknown)}, expected some of {sorted(workload.BATCHES)}")
    profiles: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as temporary:
        folder = pathlib.Path(temporary)
        rounds = 2 if quick and not _ROUNDS.present else _ROUNDS.value
        results = race(batches, entries(_SIDES.value), folder, rounds=rounds)
        compiling = run_alone("compile_time", *(["--quick"] if quick else []))
        if _PROFILE.value:
            first = {workload.BATCHES[name].model: name for name in reversed(batches)}
            profiles = [run_alone("profile", str(folder), name) for name in first.values()]
    values = values_of(results)
    versions = {side: r["version"] for sides in results.values() for side, r in sides.items()}
    result.finish(
        "learner",
        __doc__,
        values=values | compiling,
        aims=without_disturbed({key: aim for key, aim in AIMS.items() if key in values or key in compiling}, values),
        rows=rows_of(results),
        columns=COLUMNS,
        notes=[f"Versions: {versions}.", *(note for profile in profiles for note in profile_notes(profile))],
        beside="two threads a side, float32, sides in turns",
        is_whole=not quick,
        profiles=profiles,
    )


if __name__ == "__main__":
    app.run(main)
