"""The planner bench's markdown and figure."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from tests.bench.planner.cases import TIMES, Error
from tests.bench.planner.pipelinerl import PAPER

Errors = Mapping[str, Sequence[Error]]


def markdown(
    real: Errors,
    missing: Mapping[str, str],
    closed: Mapping[str, float],
    simulated: Mapping[str, float],
    aims: Mapping[str, Mapping[str, Any]],
) -> str:
    """All tables."""
    return "\n".join(
        [
            "# The planner: predicted against published and measured",
            "",
            *_aims(aims),
            *_pipelinerl(closed, simulated),
            *_real(real, missing),
        ]
    )


def _aims(aims: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| aim | value | wanted | met |", "|---|---|---|---|"]
    for key, aim in aims.items():
        value = "none" if aim["value"] is None else f"{aim['value']:.3f}"
        met = "yes" if aim["met"] else "no"
        lines.append(f"| `{key}` | {value} | {aim['aim']} | {met} |")
    return [*lines, ""]


def _pipelinerl(closed: Mapping[str, float], simulated: Mapping[str, float]) -> list[str]:
    lines = [
        "## PipelineRL, appendix A",
        "",
        "U(h) linear to 0.384 at h = 192, tau = 84 / 17.08, N = B = 128, uniform lengths from 1 to 1024; "
        "H = 192, I = 44 against G = 133. Tokens a flash.",
        "",
        "| | paper | closed formulas | simulated |",
        "|---|---|---|---|",
    ]
    rows = [
        ("r_gen", PAPER["r_gen"], closed["r_gen"], None),
        ("r_train", PAPER["r_train"], closed["r_train"], None),
        ("r_pipeline", 16.9, min(closed["r_gen"], closed["r_train"]), simulated["r_pipeline"]),
        ("r_conv_gen", 18.3, closed["r_conv_gen"], None),
        ("r_conv", PAPER["r_conv"], closed["r_conv"], simulated["r_conv"]),
        ("speedup", PAPER["speedup"], closed["speedup"], simulated["speedup"]),
        ("largest lag, PipelineRL", 133, closed["g_max"], simulated["max_lag_pipeline"]),
    ]
    for name, paper, formula, sim in rows:
        lines.append(f"| {name} | {paper:g} | {formula:.4g} | {'' if sim is None else f'{sim:.4g}'} |")
    return [
        *lines,
        "",
        "The linear curve gives r_conv_gen 17.0 where the paper's measured one gives 18.3; the rest follows from it.",
        "",
    ]


def _real(real: Errors, missing: Mapping[str, str]) -> list[str]:
    lines = [
        "## Measured runs",
        "",
        "`max_rel_error_real` is of overlap, tail and inflight, when all three are here; async_ratio's is by itself.",
        "A largest lag is that of a run's one worst group, where the simulator's times don't vary; mean lags compare "
        "better.",
        "",
    ]
    lines += [f"- {bench}: not compared ({why})" for bench, why in missing.items()]
    if real:
        lines += ["", "| bench | run | metric | measured | predicted | off |", "|---|---|---|---|---|---|"]
    for bench, errors in real.items():
        for e in errors:
            counts = "" if e.metric in TIMES else " (not part of the aim)"
            off = f"{e.relative:+.1%}" if e.measured else "-"
            lines.append(f"| {bench} | {e.name} | {e.metric}{counts} | {e.measured:.3f} | {e.predicted:.3f} | {off} |")
    return [*lines, ""]


def plot(real: Errors, simulated: Mapping[str, float], path: pathlib.Path) -> None:
    """Predicted over published or measured, all in one: a point on the line is right."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    papers, runs = figure.subplots(1, 2)
    pairs = [
        ("PipelineRL r_conv", PAPER["r_conv"], simulated["r_conv"]),
        ("PipelineRL r_pipeline", 16.9, simulated["r_pipeline"]),
        ("PipelineRL speedup", PAPER["speedup"], simulated["speedup"]),
    ]
    papers.barh([name for name, *_ in pairs], [100 * (got / wanted - 1) for _, wanted, got in pairs])
    papers.axvline(0, color="black", lw=1)
    papers.set(title="against PipelineRL", xlabel="predicted over published, %")
    for bench, errors in real.items():
        timed = [e for e in errors if e.metric in TIMES]
        runs.loglog([e.measured for e in timed], [e.predicted for e in timed], "o", ms=4, label=bench)
    if any(real.values()):
        low, high = runs.get_xlim()
        runs.plot([low, high], [low, high], color="black", lw=1)
        runs.fill_between([low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], alpha=0.15, color="gray")
        runs.legend()
    else:
        runs.text(0.5, 0.5, "no measured runs", ha="center", transform=runs.transAxes)
    runs.set(title="against measured runs", xlabel="measured (s, samples/s)", ylabel="predicted")
    for axes in (papers, runs):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
