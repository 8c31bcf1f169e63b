"""What was measured, and what of it is compared with the paper."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.overlap.setups import FEW_PLACES, FLAT, MANY_PLACES, Setup
from tests.bench.rig import report
from tests.bench.rig.rig import Result

AIM_REDUCTION = {32: 32.9, 64: 37.6, 96: 42.3}
"""Percent off `serial`'s time, the best of the paper's four tasks: 30.7-32.9 at 32 and 39.8-42.3 at 96 (section 5.2).
It gives no numbers for 64: half-way."""
AIM_WAIT = {32: 0.33, 64: 0.235, 96: 0.14}
"""The paper's waiting ratio of CGP+FGD is 14-33% over its sizes and 13.8-15.0% at 96 (section 5.3). It gives no numbers
for 64: half-way."""
SERIAL_WAIT = (0.47, 0.52)
"""Of the paper's baseline; what a pipeline can save is bounded by it."""
AIM_FGD = 2.5
"""Percent off CGP's time, the least of the paper's twelve settings; the most is 11.4 (section 5.2)."""
SAME_COMPUTE = (0.985, 1.015)
"""Trainer compute over `serial`'s in the paper's Table 1 (OlyPhys at R = 64 differs most)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A mode at a size on an engine: a number a round."""

    engine: str
    mode: str
    groups: int
    total_s: list[float]
    waiting_ratio: list[float]
    waiting_ratio_eq4: list[float]
    first_dispatch_s: list[float]
    wait_s: list[float]
    compute_s: list[float]
    compute_cpu_s: list[float]
    """CPU seconds of the learner's process in gradients and optimizer steps."""

    @classmethod
    def of(cls, setup: Setup, mode: str, groups: int, result: Result) -> "Row":
        """A session's rounds."""
        rounds = result.rounds
        per_round = len(result.step_cpu_s) // len(rounds)
        return cls(
            engine=setup.name,
            mode=mode,
            groups=groups,
            total_s=[r["round/rollout_to_train_end_s"] for r in rounds],
            waiting_ratio=[r["round/waiting_ratio"] for r in rounds],
            waiting_ratio_eq4=[r["round/waiting_ratio_eq4"] for r in rounds],
            first_dispatch_s=[r["round/first_dispatch_s"] for r in rounds],
            wait_s=[r["round/wait_s"] for r in rounds],
            compute_s=[r["round/compute_s"] for r in rounds],
            compute_cpu_s=[sum(result.step_cpu_s[n * per_round : (n + 1) * per_round]) for n, _ in enumerate(rounds)],
        )

    @property
    def mean_s(self) -> float:
        """From a round's first tickets to its last step."""
        return report.mean_std(self.total_s)[0]

    @property
    def wait(self) -> float:
        """The mean waiting ratio (section 5.1)."""
        return report.mean_std(self.waiting_ratio)[0]


Rows = Mapping[tuple[str, str, int], Row]
"""By engine, mode and groups a round."""


def paired(numbers: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The mean of the ratios, and two standard errors of it.

    Round n of a session has the same prompts in every mode, so rounds are compared one by one; only what is left of
    their difference is noise.
    """
    ratios = [a / b for a, b in zip(numbers, others, strict=True)]
    mean, std = report.mean_std(ratios)
    return mean, 2 * std / math.sqrt(len(ratios))


def values_of(rows: Rows, sizes: Sequence[int]) -> dict[str, float]:
    """Everything compared with the paper, flat."""
    values: dict[str, float] = {}
    computes = []
    for groups in sizes:
        serial = rows[FEW_PLACES.name, "serial", groups]
        values[f"wait_ratio_R{groups}_serial"] = serial.wait
        for mode in ("cgp", "rolloutpipe"):
            row = rows[FEW_PLACES.name, mode, groups]
            computes.append(paired(row.compute_cpu_s, serial.compute_cpu_s))
            values[f"reduction_pct_R{groups}_{mode}"] = 100 * (1 - row.mean_s / serial.mean_s)
            values[f"wait_ratio_R{groups}_{mode}"] = row.wait
            values[f"compute_ratio_R{groups}_{mode}"] = computes[-1][0]
    for setup in (MANY_PLACES, FLAT, FEW_PLACES):
        for groups in sizes:
            pipe, cgp = (rows[setup.name, mode, groups] for mode in ("rolloutpipe", "cgp"))
            _, noise = paired(pipe.total_s, cgp.total_s)
            values[f"fgd_over_cgp_pct{setup.key}_R{groups}"] = 100 * (1 - pipe.mean_s / cgp.mean_s)
            values[f"fgd_over_cgp_noise_pct{setup.key}_R{groups}"] = 100 * noise
    ratio, noise = max(computes, key=lambda x: abs(x[0] - 1))
    return values | {"compute_ratio": ratio, "compute_ratio_noise": noise}


def aims_of(values: Mapping[str, float], sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The paper's numbers as bounds; none for the sizes of a small run, nor for the engine made from those numbers."""
    aims = {}
    for groups in (r for r in sizes if r in AIM_WAIT):
        for mode in ("cgp", "rolloutpipe"):
            key = f"reduction_pct_R{groups}_{mode}"
            aims[key] = report.Aim(value=values[key], aim=AIM_REDUCTION[groups]).to_json()
            key = f"wait_ratio_R{groups}_{mode}"
            aims[key] = report.Aim(value=values[key], aim=AIM_WAIT[groups], at_least=False).to_json()
        key = f"fgd_over_cgp_pct_R{groups}"
        aims[key] = report.Aim(value=values[key], aim=AIM_FGD).to_json()
    for groups in sizes:
        aims[f"wait_ratio_R{groups}_serial"] = report.within(values[f"wait_ratio_R{groups}_serial"], SERIAL_WAIT)
    return aims | {"compute_ratio": report.within(values["compute_ratio"], SAME_COMPUTE)}


def table_of(rows: Rows) -> report.Table:
    """A line a row."""

    def cell(values: list[float], digits: int) -> str:
        mean, std = report.mean_std(values)
        return f"{mean:.{digits}f} ± {std:.{digits}f}"

    lines = []
    for (engine, mode, groups), row in rows.items():
        serial = rows.get((engine, "serial", groups))
        cgp = rows[engine, "cgp", groups] if mode != "serial" else None
        off = [
            f"{100 * (1 - row.mean_s / other.mean_s):.1f}" if other is not None and other is not row else "-"
            for other in (serial, cgp)
        ]
        cells = [cell(row.total_s, 2), *off, cell(row.waiting_ratio, 3), cell(row.waiting_ratio_eq4, 3)]
        cells += [cell(row.first_dispatch_s, 2), cell(row.compute_s, 2), cell(row.compute_cpu_s, 2)]
        lines.append([engine, str(groups), mode, *cells])
    return report.Table(
        columns=[
            "engine",
            "R",
            "mode",
            "rollout to train end, s",
            "less than serial, %",
            "less than cgp, %",
            "waiting ratio (5.1)",
            "waiting ratio (eq. 4)",
            "first dispatch, s",
            "compute, s",
            "compute, CPU s",
        ],
        rows=lines,
    )


def remarks_of(rows: Rows, values: Mapping[str, float], sizes: Sequence[int], speeds: Mapping[int, float]) -> list[str]:
    """What came out, from the numbers; `speeds` are the real engine's tokens/s by sequences running."""
    last = sizes[-1]
    pipe, cgp = (rows[FEW_PLACES.name, mode, last] for mode in ("rolloutpipe", "cgp"))
    first = report.mean_std(pipe.first_dispatch_s)[0]
    pipe_wait_s, cgp_wait_s = (report.mean_std(row.wait_s)[0] for row in (pipe, cgp))

    def gains(key: str) -> str:
        return ", ".join(
            f"{values[f'fgd_over_cgp_pct{key}_R{r}']:+.1f}% (noise {values[f'fgd_over_cgp_noise_pct{key}_R{r}']:.1f})"
            for r in sizes
        )

    at = " and ".join(f"R = {r}" for r in sizes)
    places, half = MANY_PLACES.max_num_seqs, MANY_PLACES.max_num_seqs // 2
    return [
        f"Frontier dispatch against CGP alone, percent off its time at {at} (the paper: 2.5 to 11.4):",
        f"- on the real engine with {places} places: {gains(MANY_PLACES.key)}. It makes {speeds[half]:.0f} tokens/s "
        f"with {half} sequences and {speeds[places]:.0f} with {places}, so a frontier of {half} requests gives up "
        f"{100 * (1 - speeds[half] / speeds[places]):.0f}% of its speed, which no order of service brings back;\n- on "
        f"the paced engine, which serves {half} requests as fast as {places}: {gains(FLAT.key)}. It is made from the "
        "paper's numbers, so this shows what the gain depends on and meets no aim;\n- on the real engine with "
        f"{FEW_PLACES.max_num_seqs} places: {gains(FEW_PLACES.key)}.",
        f"What is left at R = {last} under `rolloutpipe` on {FEW_PLACES.name}: {pipe_wait_s:.2f} s of "
        f"wait a round, of which {first:.2f} s until the first group is there; the rest are moments in which training "
        f"had caught up with generation. `cgp` waits {cgp_wait_s:.2f} s. An actor claims only what its "
        "engine has room for, lowest order first, and passes the order to vLLM as priority, so `cgp` concentrates on "
        "the earliest groups too; the paper's did not.",
    ]
