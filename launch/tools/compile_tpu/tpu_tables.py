"""Tables and JSON numbers of `launch.tools.compile_tpu`."""

import re
from typing import Any

from rich.table import Table

from configs.schema import Config
from launch.terminal import make_console
from launch.tools.compile_tpu.estimate import StepEstimate


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
        flops, moved = (program["xla"][key] or 0.0 for key in ("flops", "bytes accessed"))
        collectives = ", ".join(f"{kind} {count}" for kind, count in program["collectives"].items()) or "none"
        programs.add_row(
            name, f"{flops / 1e12:.2f}", f"{moved / 1e9:.1f}", collectives, f"{program['compile_s']:.0f} s"
        )
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
