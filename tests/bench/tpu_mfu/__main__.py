"""Model FLOPs utilization that XLA's estimates imply for the learner on TPU slices

    python -m tests.bench.tpu_mfu [--small]

The learner's steps are compiled for a slice without a TPU (`launch.tools.compile_tpu`), with each rematerialization
policy that `remat=auto` knows. A chip's seconds are the sum, one after another, of

* XLA's own cycles of each fusion, as often as it runs, over the clock at the peak;
* Pallas kernels: their FLOPs at 70% of the peak. XLA estimates nothing of them. libtpu's schedule of a splash block has
  79% (forward) to 89%, without stalls; grouped matmuls are taken alike;
* collectives: the bytes that a chip sends by a ring, over all its links, with nothing beside them.

Nothing here is measured on a chip. MFU counts no recomputed FLOPs, and half of the attention's pairs.
"""

import math
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import app

from launch.tools.compile_tpu import compile_worker
from launch.tools.compile_tpu.__main__ import CompileJob, compile_job, make_job, num_chips
from launch.tools.compile_tpu.estimate import StepEstimate
from learner.metrics.flops import TPU_CHIPS
from learner.update.auto_remat import CHOICES
from tests.bench.harness import result
from tests.bench.tpu_mfu import hlo

CASES = ("tpu_v5p_64:Qwen2.5-7B", "tpu_v5p_128:Qwen3-30B-A3B")
SMALL = ("tpu_v5e_16:Qwen3-1.7B",)
KERNEL_EFFICIENCY = 0.7
FLOPS_PER_CYCLE = {"v5e": 2 * 4 * 128 * 128, "v5p": 2 * 8 * 128 * 128}
"""Of all matrix units: 4 on v5e, two cores with 4 each on v5p, of 128 x 128."""
SENT_BYTES_PER_S = {"v5e": 200e9, "v5p": 600e9}
"""Over all links of a chip in one direction: 1600 Gbit/s on v5e, half of 1200 GB/s on v5p (cloud.google.com/tpu/docs).
"""
MATMULS = {"fwd": 2, "dq": 3, "dkv": 4, "dkv_fused": 5}
"""Of a splash kernel."""
COLUMNS = {
    "case": "{case}",
    "rows x tokens": "{rows} x {row_tokens}",
    "remat": "{remat}",
    "HBM GiB": "{hbm_gib:.1f} of {limit_gib:.1f}",
    "fits": "{fits}",
    "fusions, s": "{fusions_s:.2f}",
    "kernels, s": "{kernels_s:.2f}",
    "collectives, s": "{collectives_s:.2f}",
    "update, s": "{update_s:.1f}",
    "implied MFU": "{mfu:.1%}",
}


def main(argv: list[str]) -> None:
    """Compiles all, writes the results, prints the JSON line."""
    del argv
    rows = [row for case in (SMALL if result.SMALL.value else CASES) for row in rows_of(case)]
    best = {row["case"]: max(r["mfu"] for r in rows if r["case"] == row["case"] and r["fits"]) for row in rows}
    values = {f"mfu_{'moe' if 'A3B' in case else 'dense'}": mfu for case, mfu in best.items()}
    result.finish(
        "tpu_mfu",
        __doc__,
        values=values,
        aims={
            "mfu_dense": result.at_least(0.55, "ours"),
            "mfu_moe": result.at_least(0.40, "ours"),
        },
        rows=rows,
        columns=COLUMNS,
        notes=[f"`{r['case']}`, {r['remat']}: loops of unknown length {r['unknown']}" for r in rows if r["unknown"]],
    )


def rows_of(case: str) -> list[dict[str, Any]]:
    """Returns a row for each policy of rematerialization; one that does not compile has none."""
    python = compile_worker.tpu_python()
    rows = []
    for remat in CHOICES:
        job = make_job(case, None, None, {"model.remat": remat})
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_job(job, python, dump=folder)
            texts = {file.stem: file.read_text() for file in pathlib.Path(folder).glob("*.hlo")}
        if compiled.estimate is None:
            print(f"{case} remat={remat}: {compiled.answer['error']['message'][:200]}", flush=True)
            continue
        rows.append(row_of(case, remat, job, compiled.estimate, texts))
        print({k: v for k, v in rows[-1].items() if k != "kernels"}, flush=True)
    return rows


def row_of(case: str, remat: str, job: CompileJob, found: StepEstimate, texts: dict[str, str]) -> dict[str, Any]:
    """Returns the seconds of an update's programs, summed, and what they imply."""
    family, chip = job.family, TPU_CHIPS[job.family]
    clock = chip.flops_per_s / FLOPS_PER_CYCLE[family]
    passes = found.num_micro_batches * found.num_epochs
    runs = {"accumulate": passes, "apply": found.num_epochs, "score": found.num_micro_batches}
    fusions_s = kernels_s = collectives_s = 0.0
    unknown: list[str] = []
    kernels: dict[str, float] = {}
    for name, text in texts.items():
        work = hlo.work(text)
        seconds = {k.name: 0.0 for k in work.kernels}
        for kernel in work.kernels:
            seconds[kernel.name] += kernel.runs * kernel_flops(kernel) / (KERNEL_EFFICIENCY * chip.flops_per_s)
        kernels |= {f"{name}/{kernel}": s for kernel, s in seconds.items()}
        fusions_s += runs[name] * work.cycles / clock
        kernels_s += runs[name] * sum(seconds.values())
        collectives_s += runs[name] * work.sent_bytes / SENT_BYTES_PER_S[family]
        unknown += work.unknown_loops
    update_s = fusions_s + kernels_s + collectives_s
    packing = job.config.packing
    return {
        "case": case,
        "remat": remat,
        "rows": packing.rows,
        "row_tokens": packing.row_tokens,
        "hbm_gib": found.total_hbm_bytes / 2**30,
        "limit_gib": chip.hbm_bytes / 2**30,
        "fits": found.fits,
        "fusions_s": fusions_s,
        "kernels_s": kernels_s,
        "collectives_s": collectives_s,
        "update_s": update_s,
        "mfu": found.model_flops / (update_s * num_chips(job.topology) * chip.flops_per_s),
        "kernels": kernels,
        "unknown": unknown,
    }


def kernel_flops(kernel: hlo.Kernel) -> float:
    """Returns the FLOPs of one run of a kernel that the learner uses. Raises ValueError for another kernel.

    Splash attention skips blocks above the diagonal, so n queries and n keys are n^2 / 2 pairs. A grouped matmul takes
    each row through one expert's matrix, or contracts the rows into the experts' matrices.
    """
    if attention := re.match(r"splash_m[hq]a_(fwd|dq|dkv)", kernel.name):
        q, k = [s for s in kernel.operands if len(s) >= 3 and s[-1] >= 32 and s[-2] >= 128][:2]
        kind = attention[1]
        if kind == "dkv" and _num_like(q, kernel.results) > 2:
            kind = "dkv_fused"
        return MATMULS[kind] * 2.0 * math.prod(q) * (k[-2] - q[-2] / 2)
    if re.match(r"t?gmm", kernel.name):
        rows = next(shape for shape in kernel.operands if len(shape) == 2)
        return 2.0 * math.prod(rows) * kernel.results[0][-1]
    raise ValueError(f"kernel {kernel.name!r}: its FLOPs are not known")


def _num_like(q: tuple[int, ...], results: Sequence[tuple[int, ...]]) -> int:
    return sum(q == shape[-len(q) :] for shape in results)


if __name__ == "__main__":
    app.run(main)
