"""Do all presets learn, and does any pay for its speed? Each at tiny size, the same number of trained samples.

    python -m tests.bench.presets [--only=serial,window_tis,...] [--updates=240] [--dir=FOLDER]

Runs the main job once a case, one after the other: some three minutes each. A finished run stays in its folder and is
taken from there, if it was made by the same code, so the bench may be stopped, go on, and be run in parts; each part
ends with all that is there. Results are written once nothing is missing.

Sums of three one-digit numbers, float32, 256 held-out problems sampled at temperature 1 by the engine that serves the
policy: a start or end value has a standard error of about 0.03. Step sizes were chosen with rewards of such a set in
sight: that every preset learns is shown here, how much is no blind result. A difference of one pair below about 0.04,
the standard error of two values, says nothing, and the same case has ended 0.1 apart in another run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import app, flags

import configs.presets
from tests.bench.harness import page, result, runs

_UPDATES = flags.DEFINE_integer("updates", 240, "Updates of 128 samples each.", lower_bound=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the main job at tiny size."""

    preset: str
    seed: int = 0
    """Of the training problems; the held-out ones are the same."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def asked(self, num_updates: int) -> tuple[str, dict[str, object]]:
        """Returns the preset, and the fields that differ from it."""
        return f"{self.preset}:tiny", {"run.num_updates": num_updates, "run.seed": self.seed, **self.overrides}


PRESETS = tuple(sorted(configs.presets.PRESETS))
SEEDS = (0, 1, 2)
"""Of the presets whose accuracy is compared; 0 is every preset's own run."""
RACES = ("serial", "rollpacker")
"""RollPacker's Figure 8: tail batching loses no accuracy against synchronous training."""
DECAYING = {"optimizer.learning_rate": "4e-4", "optimizer.schedule": "linear"}
"""The step sizes of the presets in flight: a short round's prompts are others than a long round's, and a policy that
moves far with each of them swings."""
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


def seeded(name: str, seed: int) -> str:
    """Returns a case's name; the first seed has none in it."""
    return f"{name}_seed_{seed}" if seed else name


CASES: Mapping[str, Case] = {
    **{preset: Case(preset=preset) for preset in PRESETS},
    **{seeded(p, seed): Case(preset=p, seed=seed) for seed in SEEDS[1:] for p in RACES},
    **{seeded(f"{p}_decaying", seed): Case(preset=p, seed=seed, overrides=DECAYING) for p in RACES for seed in SEEDS},
    **{name: Case(preset="pipelinerl", overrides=overrides) for name, overrides in LOSSES.items()},
}
COMPARISONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "rollpacker_minus_serial": tuple((seeded("rollpacker", s), seeded("serial", s)) for s in SEEDS),
    "rollpacker_decaying_minus_serial": tuple(
        (seeded("rollpacker_decaying", s), seeded("serial_decaying", s)) for s in SEEDS
    ),
    **{
        f"{case}_minus_truncated_is": ((case, f"{case.partition('_')[0]}_truncated_is"),)
        for case in LOSSES
        if not case.endswith("truncated_is")
    },
}
"""Pairs of cases: the differences of their held-out rewards at the end."""


def values_of(rows: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Returns everything measured, flat, and a row for each comparison of which a pair is there."""
    values: dict[str, float] = {}
    for name, row in rows.items():
        values |= {f"{key}_{name}": row[key] for key in ("gain", "start", "end")}
    compared = []
    for name, pairs in COMPARISONS.items():
        found = [rows[case]["end"] - rows[other]["end"] for case, other in pairs if {case, other} <= rows.keys()]
        if found:
            mean, std = result.mean_std(found)
            values |= {name: mean, f"{name}_std": std, f"{name}_pairs": len(found)}
            compared.append({"name": name, "each": ", ".join(f"{d:+.3f}" for d in found), "mean": mean, "std": std})
    if set(PRESETS) <= rows.keys():
        values["min_gain"] = min(rows[preset]["gain"] for preset in PRESETS)
    return values, compared


def main(argv: list[str]) -> None:
    """Runs what is asked for, prints the JSON line, writes the results of a whole set."""
    del argv
    root, num_updates = runs.folder_of("presets"), _UPDATES.value
    for name in runs.chosen(CASES):
        row = runs.row_of(name, runs.run_job(*CASES[name].asked(num_updates), root / name))
        print(f"{name}: {row['start']:.3f} -> {row['end']:.3f}, {row['wall_s']:.0f} s", flush=True)
    found = {name: runs.finished_run(root / name, runs.asked_for(*c.asked(num_updates))) for name, c in CASES.items()}
    rows = {
        name: runs.row_of(name, ran, preset=CASES[name].preset, overrides=dict(CASES[name].overrides))
        for name, ran in found.items()
        if ran is not None
    }
    values, compared = values_of(rows)
    columns = {"": "{name}", "mean": "{mean:+.3f}", "standard deviation": "{std:.3f}", "each": "{each}"}
    result.finish(
        "presets",
        __doc__,
        values=values,
        aims={
            "min_gain": result.at_least(0.25, "ours"),
            "rollpacker_minus_serial": result.at_least(-0.03, "RollPacker, Figure 8: no loss; less a standard error"),
        },
        rows=list(rows.values()),
        columns=runs.COLUMNS | {"mismatch KL": "{mismatch_kl:.1e}", "dropped": "{dropped:.0f}", "set": "{overrides}"},
        notes=["Held-out reward at the end, less that of the other:", page.table(columns, compared)],
        beside=runs.MAIN_JOB,
        is_whole=len(rows) == len(CASES),
    )


if __name__ == "__main__":
    app.run(main)
