"""Do all presets learn, and does any pay for its speed? Each at tiny size, five seeds, the same number of samples.

    python -m tests.bench.presets [--only=serial_0,window_tis,...] [--updates=240] [--dir=FOLDER]

Runs the main job once per case, one after the other, some three minutes each. A finished run is taken from its folder
or from the stored result, if it is of the same code: the bench can be stopped, resumed and run in parts, and each part
stores all that is there.

Sums of three one-digit numbers, float32, 256 held-out problems sampled at temperature 1 by the engine that serves the
policy: one evaluation has a standard error of about 0.03, so a run's number is the mean of its evaluations in the last
third (steps 160, 200 and 240 of 240). A difference to `serial` is the mean over pairs of one seed, with Student's 95%
interval. `beyond_error` is how far a preset lies below `serial` beyond its error, the bound that holds for all presets
together in 95% of cases (one-sided, Bonferroni); `beyond_standard_error` counts one standard error instead, beyond
which chance alone puts some preset in most cases. Step sizes were chosen on seed 0: it counts for nothing, the seeds
here are 1 to 5.

The cases at the end compare losses on one schedule, one run each: a difference below 0.05 says nothing there. ROLL
Flash's five (section 2.2, at alpha = 2) are those of `alpha2` and the preset's own, decoupled_ppo; its TIS is
truncated_is with c = 1.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from absl import app, flags

import configs.presets
from tests.bench.harness import page, result, runs
from tests.bench.harness.benches import BENCHES
from tests.bench.harness.estimates import highest, mean

_UPDATES = flags.DEFINE_integer("updates", 240, "Updates of 128 samples each.", lower_bound=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the main job at tiny size."""

    preset: str
    seed: int
    """Of the training problems; the held-out ones are the same."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def asked(self, num_updates: int) -> tuple[str, dict[str, object]]:
        """Returns the preset, and the fields that differ from it."""
        return f"{self.preset}:tiny", {"run.num_updates": num_updates, "run.seed": self.seed, **self.overrides}


PRESETS = tuple(sorted(configs.presets.PRESETS))
SERIAL = "serial"
SEEDS = (1, 2, 3, 4, 5)
WINDOW = {"publish.every_n_steps": "4"}
"""pipelinerl with four updates a published version: the policy moves away from the one that its data was sampled by,
and the proximal policy is another one than either."""
EPOCHS = {"rounds.epochs": "2"}
"""pipelinerl with two passes over each batch: the second begins where the first one's step has gone."""
DECOUPLED, TIS = {"loss.name": "decoupled_ppo"}, {"loss.name": "tis", "loss.max_weight": "2.0"}
PUBLISHED = {"loss.proximal": "published"}
LOSSES: Mapping[str, Mapping[str, str]] = {
    "window_truncated_is": WINDOW,
    "window_decoupled_ppo": WINDOW | DECOUPLED | PUBLISHED,
    "window_tis": WINDOW | TIS | PUBLISHED,
    "epochs_truncated_is": EPOCHS,
    "epochs_decoupled_ppo": EPOCHS | DECOUPLED,
}
"""Losses on one schedule; pipelinerl's own is truncated_is with c = 5, which decoupled_ppo keeps."""
ROLL_FLASH_LOSSES: Mapping[str, Mapping[str, str]] = {
    "alpha2_grpo_clip": {"loss.name": "grpo_clip"},
    "alpha2_truncated_is": {"loss.name": "truncated_is", "loss.max_weight": "1.0"},
    "alpha2_cispo": {"loss.name": "cispo"},
    "alpha2_topr": {"loss.name": "topr"},
}
CASES: Mapping[str, Case] = {
    **{f"{preset}_{seed}": Case(preset=preset, seed=seed) for seed in SEEDS for preset in PRESETS},
    **{name: Case(preset="pipelinerl", seed=1, overrides=overrides) for name, overrides in LOSSES.items()},
    **{name: Case(preset="roll_flash", seed=1, overrides=overrides) for name, overrides in ROLL_FLASH_LOSSES.items()},
}
BASES: Mapping[str, str] = {
    case: f"{case.partition('_')[0]}_truncated_is" for case in LOSSES if not case.endswith("truncated_is")
} | dict.fromkeys(ROLL_FLASH_LOSSES, "roll_flash_1")
"""The case that each other loss is compared with."""


def late_reward(row: Mapping[str, Any]) -> float:
    """Returns the mean held-out reward of the evaluations in the last third of a run's updates."""
    return statistics.fmean(reward for step, reward in row["held_out"] if 3 * step >= 2 * row["num_steps"])


def values_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns everything measured, flat, and a row for each comparison whose runs are there."""
    values: dict[str, Any] = {f"late_{name}": row["late"] for name, row in rows.items()}
    compared, beyond, beyond_one = [], [], []
    for preset in PRESETS:
        seeds = [s for s in SEEDS if {f"{preset}_{s}", f"{SERIAL}_{s}"} <= rows.keys()]
        if not seeds:
            continue
        values[f"late_{preset}"] = late = mean([rows[f"{preset}_{s}"]["late"] for s in seeds])
        values[f"gain_{preset}"] = mean([rows[f"{preset}_{s}"]["late"] - rows[f"{preset}_{s}"]["start"] for s in seeds])
        if preset != SERIAL:
            each = [rows[f"{preset}_{s}"]["late"] - rows[f"{SERIAL}_{s}"]["late"] for s in seeds]
            values[f"{preset}_minus_serial"] = found = mean(each)
            standard_error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
            beyond_one.append(max(0.0, -found.value - standard_error))
            beyond.append(max(0.0, -highest(each, num_comparisons=len(PRESETS) - 1)))
            compared.append(_compared(f"{preset} - serial", late.value, each, [found.low, found.high]))
    values |= {"beyond_error": max(beyond, default=None), "beyond_standard_error": max(beyond_one, default=None)}
    for case, base in BASES.items():
        if {case, base} <= rows.keys():
            difference = rows[case]["late"] - rows[base]["late"]
            values[f"{case}_minus_{base}"] = difference
            compared.append(_compared(f"{case} - {base}", rows[case]["late"], [difference], None))
    gains = [values[f"gain_{preset}"].value for preset in PRESETS if f"gain_{preset}" in values]
    values["min_gain"] = min(gains, default=None)
    return values, compared


def _compared(name: str, late: float, each: list[float], interval: list[float] | None) -> dict[str, Any]:
    differences = ", ".join(f"{d:+.3f}" for d in each)
    return {
        "name": name,
        "late": late,
        "mean": statistics.fmean(each),
        "interval": page.interval(interval),
        "each": differences,
    }


def main(argv: list[str]) -> None:
    """Runs what is asked for, prints the JSON line, writes the results of a whole set."""
    del argv
    root, num_updates = runs.folder_of("presets"), _UPDATES.value
    stored = result.stored("presets")
    is_known = stored is not None and not BENCHES["presets"].is_outdated(stored)
    known = stored["rows"] if stored is not None and is_known else []
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in known if row["num_steps"] == num_updates}
    for name in (n for n in runs.chosen(CASES) if n not in rows):
        case = CASES[name]
        ran = runs.run_job(*case.asked(num_updates), root / name)
        row = runs.row_of(name, ran, preset=case.preset, overrides=dict(case.overrides))
        rows[name] = row | {"late": late_reward(row)}
        print(f"{name}: {row['start']:.3f} -> {rows[name]['late']:.3f}, {row['wall_s']:.0f} s", flush=True)
    rows = {name: rows[name] for name in CASES if name in rows}
    values, compared = values_of(rows)
    columns = {
        "": "{name}",
        "late reward": "{late:.3f}",
        "difference (95% interval)": "{mean:+.3f}{interval}",
        "each seed": "{each}",
    }
    result.finish(
        "presets",
        __doc__,
        values=values,
        aims={
            "min_gain": result.at_least(0.25, "ours"),
            "beyond_error": result.at_most(0.0, "RollPacker, Figure 8, and PipelineRL, Figure 3: no loss"),
        },
        rows=list(rows.values()),
        columns=runs.COLUMNS | {"late": "{late:.3f}", "mismatch KL": "{mismatch_kl:.1e}", "dropped": "{dropped:.0f}"},
        notes=[
            f"{len(rows)} of {len(CASES)} cases.",
            "Late held-out reward, less that of the other:",
            page.table(columns, compared),
        ],
        beside=runs.MAIN_JOB,
    )


if __name__ == "__main__":
    app.run(main)
