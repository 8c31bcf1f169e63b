"""What `launch.compile_tpu` prints and writes: tables of memory, time and collectives, and what they leave out."""

import collections
import re
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from configs.schema import Config
from launch.compile_tpu.estimate import Estimate, ProgramTime
from launch.console import make_console

Row = tuple[str, Config, Estimate | None, dict[str, Any]]
"""A case's key, its config, what was estimated (None: it didn't compile), and the worker's answer."""

UNSEEN = (
    "waiting for the host, for batches and for the slowest chip; input, publishing, checkpoints",
    "how fast a kernel really is (attention on the FLOPs of a causal mask, and grouped matmuls, are taken at 70% of "
    "the peak, 35% on v6e; an assumption, see `learner/costs/flops.py`)",
    "how fast a collective really is (taken at what the links of its group carry, one collective at a time; "
    "latency, contention and the work of reducing are left out)",
    "padding: every row is taken as full of the longest sequences, and the router's choice of experts as even; of a "
    "conditional both branches are counted",
    "clocks below the peak's (heat, power), and memory that the runtime, a published copy or fragments hold",
)


def show(key: str, config: Config, found: Estimate | None, answer: dict[str, Any]) -> None:
    """Prints one case."""
    console = make_console(width=150, highlight=False)
    console.rule(key, align="left")
    mesh = " x ".join(f"{name} {size}" for name, size in config.mesh.axes.items() if size > 1) or "one chip"
    console.print(
        f"preset {config.preset}, {answer.get('num_chips')} chips of {answer.get('device_kind')}, mesh {mesh}, "
        f"{config.packing.rows} rows of {config.packing.row_tokens} tokens, remat {_remat(config, answer)}"
    )
    if found is None:
        error = answer["error"]
        console.print(f"DOES NOT FIT: {error['program']} needs more memory than a chip has. XLA says:", style="bold")
        console.print("\n".join(f"  {line}" for line in out_of_memory(error["message"])))
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in answer.get("state_bytes", {}).items())
        console.print(f"what is there in any case, GiB a chip: {parts}")
        return
    console.print(_memory_table(found))
    console.print(_time_table(found, answer))
    console.print(_collectives_table(answer))
    for name, program in answer["programs"].items():
        for loop in program["unknown_loops"]:
            console.print(f"note: {name}: how often {loop} runs is data; taken for the head's chunks of trained tokens")
        for kernel in found.programs[name].unknown_kernels:
            console.print(f"note: {name}: the FLOPs of kernel {kernel} aren't known; counted as none")
    for line in verdict(found):
        console.print(line)
    console.print("What this doesn't see: " + "; ".join(UNSEEN) + ".", style="dim")


def verdict(found: Estimate) -> list[str]:
    """The figures in words."""
    chip, word = found.chip, "FITS" if found.fits else "DOES NOT FIT"
    times = f"{found.num_epochs} times " if found.num_epochs > 1 else ""
    return [
        f"{word}: {_gib(found.total_hbm_bytes)} of {_gib(chip.hbm_bytes)} GiB a chip",
        f"an update is {times}{found.num_micro_batches} micro-batches and one optimizer step: {found.update_s:.2f} s "
        f"estimated, {found.model_flops / 1e15:.1f} PFLOP of the model",
        f"implied MFU {found.implied_mfu:.1%} = model FLOPs / (estimated seconds x {found.num_chips} chips x "
        f"{chip.flops_per_s / 1e12:.0f} TFLOP/s)",
        f"at the roofline {found.roofline_mfu:.1%}; with recomputed FLOPs (HFU) {found.hfu:.1%}; "
        f"if attention kernels reach half of what is assumed {found.mfu_with_kernels_at(0.5):.1%}",
        "counted: 6 a matmul parameter and token, attention causal, the head at trained tokens; with all pairs and "
        f"the head everywhere it would read {found.implied_mfu * found.model_flops_all_pairs / found.model_flops:.1%}",
    ]


def out_of_memory(message: str, *, num_lines: int = 24) -> list[str]:
    """The lines of XLA's report that say how much was used and by what."""
    kept = []
    for line in message.splitlines():
        line = re.sub(r"\s+", " ", line).strip()
        line = re.sub(r'op_name="jit\(\w+\)/', 'op_name="', line)
        if line and not line.startswith(("=====", "Unpadded", "XLA label", "Allocation type")):
            kept.append(line[:240])
    return kept[:num_lines]


def markdown(rows: Sequence[Row]) -> str:
    """The results file."""
    head = (
        "case",
        "mesh",
        "rows x tokens",
        "remat",
        "fits",
        "HBM GiB a chip",
        "update s",
        "implied MFU",
        "slow kernels",
        "all pairs",
        "roofline",
        "HFU",
    )
    lines = [
        "# Compiled for TPU slices",
        "",
        "Made by `python -m launch.compile_tpu --all` on a machine without a TPU: XLA compiles the learner's real",
        "accumulate and apply steps for the slice. **Nothing here was measured on a chip.**",
        "",
        "|" + " | ".join(head) + "|",
        "|" + "---|" * len(head),
    ]
    for key, config, found, answer in rows:
        mesh = " x ".join(f"{name} {size}" for name, size in config.mesh.axes.items() if size > 1)
        shape = f"{config.packing.rows} x {config.packing.row_tokens}"
        cells = [key, mesh, shape, _remat(config, answer)]
        if found is None:
            cells += ["no (XLA refuses)"] + [""] * 7
        else:
            ratio = found.model_flops_all_pairs / found.model_flops
            cells += [
                "yes" if found.fits else "no",
                f"{_gib(found.total_hbm_bytes)} of {_gib(found.chip.hbm_bytes)}",
                f"{found.update_s:.1f}",
                f"{found.implied_mfu:.1%}",
                f"{found.mfu_with_kernels_at(0.5):.1%}",
                f"{found.implied_mfu * ratio:.1%}",
                f"{found.roofline_mfu:.1%}",
                f"{found.hfu:.1%}",
            ]
        lines.append("|" + " | ".join(cells) + "|")
    lines += ["", "## What takes the memory and the time of a chip", ""]
    for key, _, found, answer in rows:
        if found is None:
            lines += [f"**{key}**", "", "```", *out_of_memory(answer["error"]["message"]), "```", ""]
            continue
        memory = ", ".join(f"{name} {_gib(size)}" for name, size in found.hbm_bytes.items() if size >= 2**20)
        lines += [f"**{key}** GiB: {memory}."]
        for name, time in found.programs.items():
            lines += [f"`{name}` {_seconds(time)}"]
        lines += [_kinds(answer), ""]
    return "\n".join([*lines, _CONVENTIONS, *(f"- {line}" for line in UNSEEN), ""])


_CONVENTIONS = """\
## How to read it

- Chips: v5e-16 is 4x4, v5p-64 is 4x4x4, v5p-128 is 4x4x8, v6e-256 is 16x16. Google's own names of v5p slices count
  cores, two a chip.
- Fits: arguments and temporaries of the fuller step as XLA's memory analysis has them, and the optimizer's state,
  which stays in memory beside `accumulate`; against the memory that XLA lets a program use.
- Update: as many micro-batches full of the longest sequences as an update's samples take (1024, of a recipe its own
  number), and one apply.
- Estimated seconds: XLA's cycles of every fusion, times how often its loop runs, at the peak's clock; kernels and
  collectives as below; collectives that XLA schedules beside other work count only where they are longer.
- Implied MFU: model FLOPs / (estimated seconds x chips x bf16 peak). 6 FLOPs a matmul parameter and token (active
  experts only), causal attention (half the pairs), the head at trained tokens only, nothing for recomputation (that
  is HFU). 'All pairs' counts attention without its mask and the head everywhere, as PaLM does. 'Slow kernels' is
  the implied MFU if attention kernels reach half of what is assumed. 'Roofline' is the ceiling by FLOPs, HBM bytes
  and links. XLA's own `cost_analysis` counts the body of a loop once; it isn't used.

## What the estimate does not see
"""


def _memory_table(found: Estimate) -> Table:
    table = Table("memory of a chip", "GiB", "share", title_justify="left")
    for name, size in found.hbm_bytes.items():
        table.add_row(name, _gib(size), f"{size / found.chip.hbm_bytes:.1%}")
    table.add_row("all", _gib(found.total_hbm_bytes), f"{found.total_hbm_bytes / found.chip.hbm_bytes:.1%}")
    return table


def _time_table(found: Estimate, answer: dict[str, Any]) -> Table:
    columns = (
        "program",
        "TFLOP",
        "HBM GB",
        "sent GB",
        "fusions s",
        "kernels s",
        "blocking s",
        "beside s",
        "estimate s",
    )
    table = Table(*columns, "roofline s", "XLA's own", "compiled in")
    for name, time in found.programs.items():
        program = answer["programs"][name]
        sent = sum(c["sent_bytes"] for c in program["collectives"])
        seconds = (time.fusions_s, time.kernels_s, time.blocking_s, time.overlapped_s, time.step_s, time.roofline_s)
        table.add_row(
            name,
            f"{time.hardware_flops / 1e12:.2f}",
            f"{program['hbm_bytes'] / 1e9:.1f}",
            f"{sent / 1e9:.2f}",
            *(f"{s:.4f}" for s in seconds),
            _xla_seconds(program),
            f"{program['compile_s']:.0f} s",
        )
    return table


def _xla_seconds(program: dict[str, Any]) -> str:
    """XLA's optimal_seconds; it counts loop bodies once and is negative where it knows nothing."""
    seconds = program["xla"].get("optimal_seconds")
    return f"{seconds:.4f}" if seconds is not None and seconds > 0 else "none"


def _collectives_table(answer: dict[str, Any], num_rows: int = 14) -> Table:
    """The largest collectives by the seconds they take."""
    table = Table("collective", "program", "chips", "runs", "MB each", "sent GB", "seconds", "beside", "from")
    grouped: dict[tuple[Any, ...], list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, program in answer["programs"].items():
        for c in program["collectives"]:
            where = c["op_name"].removeprefix("jit(_accumulate)/").removeprefix("jit(_apply)/")
            sums = grouped[(c["kind"], name, c["group_size"], c["num_bytes"], c["is_async"], where[-58:])]
            for i, value in enumerate((c["runs"], c["sent_bytes"], c["seconds"])):
                sums[i] += value
    ordered = sorted(grouped.items(), key=lambda item: -item[1][2])
    for (kind, name, size, num_bytes, is_async, where), (runs, sent, seconds) in ordered[:num_rows]:
        beside = "yes" if is_async else "no"
        table.add_row(
            kind,
            name,
            str(size),
            f"{runs:.0f}",
            f"{num_bytes / 1e6:.1f}",
            f"{sent / 1e9:.3f}",
            f"{seconds:.4f}",
            beside,
            where,
        )
    rest = [v for _, v in ordered[num_rows:]]
    if rest:
        runs, sent, seconds = (sum(column) for column in zip(*rest, strict=True))
        table.add_row(f"{len(rest)} smaller", "", "", f"{runs:.0f}", "", f"{sent / 1e9:.3f}", f"{seconds:.4f}", "", "")
    return table


def _remat(config: Config, answer: dict[str, Any]) -> str:
    """The policy, and that auto chose it where it did."""
    chosen = answer.get("remat", config.model.remat)
    return chosen if chosen == config.model.remat else f"{chosen} ({config.model.remat})"


def _kinds(answer: dict[str, Any]) -> str:
    """Collectives of a micro-batch by kind, in words."""
    kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for c in answer["programs"]["accumulate"]["collectives"]:
        kinds[c["kind"]][0] += c["runs"]
        kinds[c["kind"]][1] += c["sent_bytes"]
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    said = ", ".join(f"{kind} {runs:.0f} times {sent / 1e9:.2f} GB" for kind, (runs, sent) in ordered)
    return f"Collectives of a micro-batch, sent a chip: {said or 'none'}."


def _seconds(time: ProgramTime) -> str:
    return (
        f"{time.step_s:.3f} s: fusions {time.fusions_s:.3f}, kernels {time.kernels_s:.3f}, blocking collectives "
        f"{time.blocking_s:.3f}, others {time.overlapped_s:.3f}; bounds: matmul {time.matmul_bound_s:.3f}, HBM "
        f"{time.hbm_bound_s:.3f}, links {time.ici_bound_s:.3f}."
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
