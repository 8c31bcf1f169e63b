"""Muon against AdamW: held-out reward at equal updates and learning rate, and a chip's memory at 1.5B parameters.

    python -m tests.bench.optimizers [--only=learning|memory] [--seeds=0,1] [--dir=FOLDER] [--small]

`learning` is the main job of preset `tiny`, whose learning rate was chosen for AdamW. `memory` compiles the learner's
steps of Qwen2.5-1.5B for 16 chips (v5e) with `launch.tools.compile_tpu`: XLA's own analysis, without a TPU. `bfloat16`
has its moments in that dtype, rounded stochastically.
"""

import statistics
from typing import Any

from absl import app

from launch.tools.compile_tpu.__main__ import compile_job, make_job
from launch.tools.compile_tpu.compile_worker import tpu_python
from tests.bench.harness import estimates, result, runs

PARTS = ("learning", "memory")
PRESET, SLICE_RECIPE = "tiny", "gsm8k_qwen2_5_1_5b"
SMALL = {"run.num_updates": 20, "evaluation.num_problems": 32}
BFLOAT16 = {"optimizer.mu_dtype": "bfloat16", "optimizer.nu_dtype": "bfloat16"}
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw": {},
    "adamw_bfloat16": BFLOAT16,
    "muon": {"optimizer.name": "muon"},
    "muon_bfloat16": {"optimizer.name": "muon"} | BFLOAT16,
}
LEARNING = {"seeds": "{seeds}", "held-out reward": "{end:.3f}", "gain": "{gain:+.3f}", "s an update": "{update_s:.2f}"}
MEMORY = {"optimizer state, GiB a chip": "{optimizer_gib:.3f}", "all memory, GiB a chip": "{chip_gib:.2f}"}


def learning(name: str) -> dict[str, Any]:
    """Returns what the seeds' runs came to."""
    fields = OPTIMIZERS[name] | (SMALL if result.SMALL.value else {})
    folder, rows = runs.folder_of("optimizers"), []
    for seed in runs.SEEDS.value[:2]:
        ran = runs.run_job(PRESET, {"run.seed": seed} | fields, folder / f"{name}_{seed}")
        rows.append(runs.row_of(name, ran))
        print(f"{name} seed {seed}: {rows[-1]['curve']}", flush=True)
    means = {key: statistics.fmean(row[key] for row in rows) for key in ("end", "gain", "update_s")}
    return means | {"seeds": len(rows), "ends": [row["end"] for row in rows]}


def memory(name: str) -> dict[str, float]:
    """Returns the GiB per chip of the optimizer's state, and of everything."""
    compiled = compile_job(make_job(SLICE_RECIPE, None, None, OPTIMIZERS[name]), tpu_python())
    if compiled.estimate is None:
        raise RuntimeError(f"{name} does not fit the slice: {compiled.answer['error']['message'][:500]}")
    found = compiled.estimate.hbm_bytes
    print(f"{name}: {found}", flush=True)
    return {"optimizer_gib": found["optimizer"] / 2**30, "chip_gib": compiled.estimate.total_hbm_bytes / 2**30}


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    parts = runs.chosen(PARTS)
    rows: list[dict[str, Any]] = [{"name": name} for name in OPTIMIZERS]
    values: dict[str, Any] = {}
    for part, measure in (("memory", memory), ("learning", learning)):
        for row in rows if part in parts else ():
            row |= measure(row["name"])
    for row in rows:
        fields = ("end", "optimizer_gib", "chip_gib")
        values |= {f"{field}_{row['name']}": row[field] for field in fields if field in row}
    if "learning" in parts:
        adamw, *others = (row["ends"] for row in rows)
        for name, ends in zip(list(OPTIMIZERS)[1:], others, strict=True):
            values[f"{name}_minus_adamw"] = estimates.mean([a - b for a, b in zip(ends, adamw, strict=True)])
    result.finish(
        "optimizers",
        __doc__,
        values=values,
        aims={f"{name}_minus_adamw": result.at_least(-0.05, "ours") for name in list(OPTIMIZERS)[1:]},
        rows=rows,
        columns={"optimizer": "{name}"}
        | (LEARNING if "learning" in parts else {})
        | (MEMORY if "memory" in parts else {}),
        beside=runs.MAIN_JOB,
        is_whole=len(parts) == len(PARTS),
    )


if __name__ == "__main__":
    app.run(main)
