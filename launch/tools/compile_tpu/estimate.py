"""Memory and update time of a compiled step on a TPU chip, as numbers and tables.

Memory is XLA's own analysis. Time is computed from the model's FLOPs, not from the compiled program:

    update_s = (model FLOPs + recomputed FLOPs + FLOPs of scoring) / (chips x peak x utilization)

`UTILIZATION` is an assumption, which includes the optimizer step, collectives and the host.
"""

import dataclasses
import math
import re
from typing import Any

from rich.table import Table

from configs.schema import Config
from launch.terminal import make_console
from learner.metrics import flops
from learner.metrics.flops import TpuChip
from learner.model.architecture import Architecture

UTILIZATION = {"v5e": 0.5, "v5p": 0.5, "v6e": 0.4}
"""Assumed fraction of a chip's bf16 peak, including recomputed FLOPs; not measured. XLA's cycle counts of the presets'
programs gave 0.48 to 0.51 on v5e, 0.32 (experts) to 0.68 on v5p, and 0.41 on v6e."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Memory and time of one update on a slice."""

    hbm_bytes: dict[str, int]
    """Peak bytes per chip, by kind; their sum decides if the step fits."""
    num_micro_batches: int
    num_epochs: int
    model_flops: float
    """FLOPs per update that training requires, over all chips."""
    hardware_flops: float
    """`model_flops` plus recomputed and scoring FLOPs, over all chips."""
    utilization: float
    """Assumed fraction of the peak."""
    update_s: float
    """Seconds per update at that utilization."""
    chip: TpuChip

    @property
    def total_hbm_bytes(self) -> int:
        """Required bytes per chip."""
        return sum(self.hbm_bytes.values())

    @property
    def fits(self) -> bool:
        """True if a chip has enough memory."""
        return self.total_hbm_bytes <= self.chip.hbm_bytes


def estimate(answer: dict[str, Any], config: Config, model: Architecture, family: str) -> StepEstimate:
    """Converts an answer of `launch.tools.compile_tpu.compile_worker` into memory and seconds on a chip generation."""
    n, epochs, chip = num_micro_batches(config), config.rounds.epochs, flops.TPU_CHIPS[family]
    needed, computed, scoring = micro_batch_flops(config, model, answer.get("remat", config.model.remat))
    all_computed = n * (epochs * computed + (scoring if "score" in answer["programs"] else 0.0))
    return StepEstimate(
        hbm_bytes=hbm_bytes(answer),
        num_micro_batches=n,
        num_epochs=epochs,
        model_flops=n * epochs * needed,
        hardware_flops=all_computed,
        utilization=UTILIZATION[family],
        update_s=seconds(all_computed, answer["num_chips"], family),
        chip=chip,
    )


def seconds(computed_flops: float, num_chips: int, family: str) -> float:
    """Returns the seconds of a slice at the assumed utilization."""
    return computed_flops / (num_chips * flops.TPU_CHIPS[family].flops_per_s * UTILIZATION[family])


def micro_batch_flops(config: Config, model: Architecture, remat: str) -> tuple[float, float, float]:
    """Returns the FLOPs per micro-batch: (model, model and recomputed with `remat`, scoring)."""
    tokens, scored, squares = micro_batch_lengths(config)
    work: dict[str, Any] = dict(num_tokens=tokens, num_scored_tokens=scored, sum_squared_lengths=squares)
    needed = flops.model_flops(model, **work, num_adapter_params=flops.adapter_params(model, config.lora))
    recomputed = 0.0
    if remat == "gate":
        width = model.num_experts_per_token * model.moe_intermediate_size or model.intermediate_size
        recomputed = 2.0 * tokens * model.num_layers * model.hidden_size * width
    elif remat in ("full", "attention"):
        pairs = squares if remat == "full" else 0
        recomputed = flops.forward_flops(model, num_tokens=tokens, num_scored_tokens=0, sum_squared_lengths=pairs)
    return needed, needed + recomputed, flops.forward_flops(model, **work)


def micro_batch_lengths(config: Config) -> tuple[int, int, int]:
    """Returns tokens, scored tokens and summed squared lengths of a micro-batch full of longest sequences."""
    longest = config.model.max_tokens
    num_sequences = config.packing.rows * (config.packing.row_tokens // longest)
    return num_sequences * longest, num_sequences * config.sampling.max_response_tokens, num_sequences * longest**2


def num_micro_batches(config: Config) -> int:
    """Returns the micro-batches per update if every sequence has the maximum length."""
    sequences = config.groups_per_update * (1 if config.loss.is_supervised else config.rounds.samples_per_group)
    a_batch = config.packing.rows * (config.packing.row_tokens // config.model.max_tokens)
    return math.ceil(sequences / a_batch)


def hbm_bytes(answer: dict[str, Any]) -> dict[str, int]:
    """Returns the peak bytes per chip by kind.

    The optimizer state is not an argument of `accumulate`, so XLA does not count it there, although it stays in memory.
    Its padded size is the difference between the arguments of `apply` and `accumulate`. A frozen scoring model and the
    base of adapters also stay. The base is an argument of `accumulate` but not of `apply`, and is not counted twice if
    it is the reference.
    """
    state, programs = answer["state_bytes"], answer["programs"]
    memory = {name: p["memory"] for name, p in programs.items()}
    optimizer, base = state["optimizer"], state.get("base", 0)
    if "apply" in memory:
        optimizer = max(
            memory["apply"]["argument"] - memory["accumulate"]["argument"] + base + state["batch"], optimizer
        )
    frozen = max(memory["score"]["argument"] - base - state["batch"], 0) if "score" in memory else 0
    frozen += state.get("reference", 0) + state.get("teachers", 0)
    parts = {"parameters": state["parameters"], "accumulator": state["accumulator"], "batch": state["batch"]}
    parts |= {"frozen base": base} if base else {}
    padding = max(memory["accumulate"]["argument"] - sum(parts.values()), 0)
    own = {name: _own(m) for name, m in memory.items()}
    fullest = max(own, key=lambda name: own[name])
    code = sum(m["generated_code"] for m in memory.values())
    return (
        parts
        | {"padding to tiles": padding, "optimizer": optimizer}
        | ({"frozen model": frozen} if frozen else {})
        | {f"temporaries of {fullest}": own[fullest], "programs": code}
    )


def _own(memory: dict[str, int]) -> int:
    return memory["temp"] + max(memory["output"] - memory["alias"], 0)


def show(key: str, config: Config, found: StepEstimate | None, answer: dict[str, Any]) -> None:
    """Prints one case."""
    console = make_console(width=150, highlight=False)
    console.rule(key, align="left")
    row = numbers(config, found, answer)
    console.print(
        f"preset {config.preset}, {answer.get('num_chips')} chips of {answer.get('device_kind')}, "
        f"mesh {row['mesh'] or 'one chip'}, {row['rows']} rows of {row['row_tokens']} tokens, remat {row['remat']}"
    )
    if found is None:
        error = answer["error"]
        console.print(
            f"DOES NOT FIT: {error['program']} needs more memory than a chip has. Error of XLA:", style="bold"
        )
        console.print("\n".join(f"  {line}" for line in out_of_memory(error["message"])))
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in answer.get("state_bytes", {}).items())
        console.print(f"memory independent of the step, GiB per chip: {parts}")
        return
    memory = Table("memory per chip", "GiB", "share")
    for name, size in [*found.hbm_bytes.items(), ("all", found.total_hbm_bytes)]:
        memory.add_row(name, _gib(size), f"{size / found.chip.hbm_bytes:.1%}")
    console.print(memory)
    programs = Table(
        "program", "XLA's TFLOP", "XLA's GB", "collectives", "compiled in", caption="loop bodies count once"
    )
    for name, program in answer["programs"].items():
        work, moved = (program["xla"][key] or 0.0 for key in ("flops", "bytes accessed"))
        collectives = ", ".join(f"{kind} {count}" for kind, count in program["collectives"].items()) or "none"
        programs.add_row(name, f"{work / 1e12:.2f}", f"{moved / 1e9:.1f}", collectives, f"{program['compile_s']:.0f} s")
    console.print(programs)
    times = f"{found.num_epochs} times " if found.num_epochs > 1 else ""
    console.print(
        f"{'FITS' if found.fits else 'DOES NOT FIT'}: {_gib(found.total_hbm_bytes)} of {_gib(found.chip.hbm_bytes)} "
        f"GiB per chip\nan update is {times}{found.num_micro_batches} micro-batches of the longest sequences: "
        f"{found.model_flops / 1e15:.1f} PFLOP of the model, {found.hardware_flops / 1e15:.1f} computed; "
        f"{found.update_s:.2f} s if a chip reaches {found.utilization:.0%} of its {found.chip.flops_per_s / 1e12:.0f} "
        "TFLOP/s (an assumption)"
    )


def numbers(config: Config, found: StepEstimate | None, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a case as plain numbers; if XLA ran out of memory, only the shape and the error."""
    chosen = answer.get("remat", config.model.remat)
    row = {
        "mesh": " x ".join(f"{name} {size}" for name, size in config.mesh.axes.items() if size > 1),
        "rows": config.packing.rows,
        "row_tokens": config.packing.row_tokens,
        "remat": chosen if chosen == config.model.remat else f"{chosen} ({config.model.remat})",
        "fits": found is not None and found.fits,
    }
    if found is None:
        return row | {"error": out_of_memory(answer["error"]["message"])}
    programs = {name: {k: program[k] for k in ("collectives", "xla")} for name, program in answer["programs"].items()}
    return row | {
        "hbm_bytes": found.hbm_bytes,
        "hbm_limit_bytes": found.chip.hbm_bytes,
        "num_micro_batches": found.num_micro_batches,
        "num_epochs": found.num_epochs,
        "model_flops": found.model_flops,
        "hardware_flops": found.hardware_flops,
        "utilization": found.utilization,
        "update_s": found.update_s,
        "programs": programs,
    }


def all_cases(rows: dict[str, dict[str, Any]]) -> Table:
    """Returns the table of the `numbers` of several cases."""
    table = Table("case", "mesh", "rows x tokens", "remat", "fits", "HBM GiB per chip", "update s")
    for key, row in rows.items():
        found = ("no (XLA refuses)", "", "")
        if "update_s" in row:
            used = f"{_gib(sum(row['hbm_bytes'].values()))} of {_gib(row['hbm_limit_bytes'])}"
            found = ("yes" if row["fits"] else "no", used, f"{row['update_s']:.1f}")
        table.add_row(key, row["mesh"], f"{row['rows']} x {row['row_tokens']}", row["remat"], *found)
    return table


def out_of_memory(message: str, *, num_lines: int = 24) -> list[str]:
    """Returns the lines of XLA's out-of-memory report that show the usage."""
    kept = []
    for line in message.splitlines():
        line = re.sub(r"\s+", " ", line).strip()
        line = re.sub(r'op_name="jit\(\w+\)/', 'op_name="', line)
        if line and not line.startswith(("=====", "Unpadded", "XLA label", "Allocation type")):
            kept.append(line[:240])
    return kept[:num_lines]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
