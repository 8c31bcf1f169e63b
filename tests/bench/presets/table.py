"""The presets bench's page, its numbers and its aims."""

import os
import platform
from collections.abc import Mapping
from typing import Any

from tests.bench.presets.cases import CASES, COMPARISONS, PRESETS, Comparison
from tests.bench.rig.report import Aim, Table, mean_std

AIM_GAIN = 0.25
AIM_RACE = -0.03
"""No loss of accuracy, to the standard error of one held-out value (256 problems)."""

Results = Mapping[str, Mapping[str, Any]]
"""By case: the run's summary, and what its metrics add up to."""


def differences(comparison: Comparison, results: Results) -> list[float]:
    """Held-out reward at the end, case less the other, for the pairs that are there."""
    return [
        results[case]["held_out_reward_end"] - results[other]["held_out_reward_end"]
        for case, other in comparison.pairs
        if case in results and other in results
    ]


def gain(result: Mapping[str, Any]) -> float:
    """Held-out reward, end less start."""
    return result["held_out_reward_end"] - result["held_out_reward_start"]


def values_of(results: Results) -> dict[str, float]:
    """Everything measured, flat."""
    values: dict[str, float] = {}
    for name, result in results.items():
        values |= {
            f"gain_{name}": gain(result),
            f"start_{name}": result["held_out_reward_start"],
            f"end_{name}": result["held_out_reward_end"],
        }
    for comparison in COMPARISONS:
        if found := differences(comparison, results):
            mean, std = mean_std(found)
            values |= {comparison.name: mean, f"{comparison.name}_std": std, f"{comparison.name}_pairs": len(found)}
    return values


def aims_of(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What is wanted; a number that needs runs which are not there is null and not met."""
    gains = [values.get(f"gain_{preset}") for preset in PRESETS]
    worst = min((g for g in gains if g is not None), default=None) if None not in gains else None
    race = next(c for c in COMPARISONS if c.name == "rollpacker_minus_serial")
    is_whole = values.get(f"{race.name}_pairs") == len(race.pairs)
    return {
        "min_gain": Aim(value=worst, aim=AIM_GAIN).to_json(),
        race.name: Aim(value=values[race.name] if is_whole else None, aim=AIM_RACE).to_json(),
    }


def markdown(results: Results) -> str:
    """The page, of the runs that are there."""
    missing = [name for name in CASES if name not in results]
    parts = [
        "# Every preset learns",
        f"`python -m tests.bench.presets`, on {os.cpu_count()} cores ({platform.machine()}), real vLLM, float32, sums "
        "of three one-digit numbers, 256 held-out problems sampled at temperature 1 by the engine that serves the "
        "policy. A start or end value has a standard error of about 0.03. Each trains the same number of samples; "
        "wall time counts everything (engine start, compilation, evaluation). Step sizes were chosen with rewards of "
        "such a set in sight (`learning.md`): that every preset learns is shown here, how much is no blind result.",
    ]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    parts += [_runs(results).markdown(), "## Held against each other", _comparisons(results).markdown()]
    parts.append(
        "Held-out reward at the end, less that of the other. With one pair there is no spread: a difference below "
        "about 0.04, the standard error of two values, says nothing, and the same case has ended 0.1 apart in another "
        "run. Single last evaluations scatter: means of several late ones over seeds are to be compared. "
        "What cases change of their preset: "
        + "; ".join(
            f"`{case.name}` ({case.preset}) {' '.join(f'{k}={v}' for k, v in case.overrides.items())}"
            for case in CASES.values()
            if case.overrides and "_seed_" not in case.name
        )
        + "."
    )
    return "\n\n".join(parts) + "\n"


def _runs(results: Results) -> Table:
    columns = ["run", "seed", "start", "end", "gain", "curve (step: reward)", "samples trained", "mean lag", "max lag"]
    columns += ["ESS", "mismatch KL", "engine against learner", "groups dropped", "wall s"]
    rows = []
    for name, r in results.items():
        curve = ", ".join(f"{step}: {reward:.2f}" for step, reward in r["held_out"])
        rows.append(
            [
                name,
                str(CASES[name].seed),
                f"{r['held_out_reward_start']:.3f}",
                f"{r['held_out_reward_end']:.3f}",
                f"{gain(r):+.3f}",
                curve,
                f"{r['trained_samples']:.0f}",
                f"{r['lag_mean']:.2f}",
                f"{r['lag_max']:.0f}",
                f"{r['ess']:.3f}",
                f"{r['mismatch_kl']:.1e}",
                "-" if r["max_parity"] is None else f"{r['max_parity']:.1e}",
                f"{r['dropped']:.0f}",
                f"{r['wall_s']:.0f}",
            ]
        )
    return Table(columns=columns, rows=rows)


def _comparisons(results: Results) -> Table:
    rows = []
    for comparison in COMPARISONS:
        if found := differences(comparison, results):
            mean, std = mean_std(found)
            spread = f"{std:.3f}" if len(found) > 1 else "-"
            each = ", ".join(f"{d:+.3f}" for d in found)
            rows.append([comparison.name, comparison.about, f"{mean:+.3f}", spread, each])
    return Table(columns=["", "what", "mean", "standard deviation", "each"], rows=rows)
