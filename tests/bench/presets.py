"""Do all presets learn? Each at tiny size, the same number of trained samples, one table.

    python -m tests.bench.presets [--presets=serial,...] [--updates=240] [--dir=FOLDER]

Runs the main job once a preset, one after the other, and writes `tests/bench/results/presets.{md,json}`.
"""

import json
import os
import pathlib
import platform
import tempfile

from absl import app, flags

from configs.run_folder import RunFolder
from learner.metrics import read_rows
from tests.bench.job import run_job

NAMES = ("serial", "cgp", "rolloutpipe", "rollpacker", "pipelinerl", "roll_flash")
AIM_GAIN = 0.25
RESULTS = pathlib.Path(__file__).parent / "results"

_PRESETS = flags.DEFINE_list("presets", list(NAMES), "Presets to run.")
_UPDATES = flags.DEFINE_integer("updates", 240, "Optimizer steps of 128 samples each.", lower_bound=2)
_DIR = flags.DEFINE_string("dir", None, "Where the runs go; a temporary folder if not given. Finished ones are kept.")


def run_one(preset: str, folder: pathlib.Path, *, num_updates: int) -> dict:
    """One run's summary, and what its metrics add up to."""
    summary = run_job(f"configs/{preset}.py:tiny", folder, reuse=True, run__num_updates=num_updates)
    rows = read_rows(RunFolder(folder).metrics)
    steps = [row for row in rows if row["kind"] == "step"]
    return summary | {
        "trained_samples": sum(row["sequences"] for row in steps),
        "dropped": steps[-1]["groups/dropped"],
        "mismatch_kl": sum(row["mismatch_kl_k3"] for row in steps) / len(steps),
        "max_parity": max((row["parity/max_abs_dlogprob"] for row in rows if row["kind"] == "probe"), default=None),
    }


def markdown(results: dict[str, dict]) -> str:
    """The table."""
    lines = [
        "# Every preset learns",
        "",
        f"`python -m tests.bench.presets`, on {os.cpu_count()} cores ({platform.machine()}), real vLLM, float32, sums "
        "of three one-digit numbers, 256 held-out problems sampled at temperature 1 by the engine that serves the "
        "policy. A start or end value has a standard error of about 0.03. Each trains the same number of samples; wall "
        "time counts everything (engine start, compilation, evaluation).",
        "",
        "| preset | start | end | gain | curve (step: reward) | samples trained | mean lag | max lag | ESS "
        "| mismatch KL | engine against learner | groups dropped | wall s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset, r in results.items():
        start, end = r["held_out_reward_start"], r["held_out_reward_end"]
        curve = ", ".join(f"{step}: {reward:.2f}" for step, reward in r["held_out"])
        parity = "-" if r["max_parity"] is None else f"{r['max_parity']:.1e}"
        lines.append(
            f"| {preset} | {start:.3f} | {end:.3f} | {end - start:+.3f} | {curve} | {r['trained_samples']:.0f} | "
            f"{r['lag_mean']:.2f} | {r['lag_max']:.0f} | {r['ess']:.3f} | {r['mismatch_kl']:.1e} | {parity} | "
            f"{r['dropped']:.0f} | {r['wall_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Runs all, writes the table, prints the JSON line."""
    root = pathlib.Path(_DIR.value or tempfile.mkdtemp(prefix="sluice-presets-"))
    results = {}
    for preset in _PRESETS.value:
        r = results[preset] = run_one(preset, root / preset, num_updates=_UPDATES.value)
        print(
            f"{preset}: {r['held_out_reward_start']:.3f} -> {r['held_out_reward_end']:.3f}, "
            f"{r['trained_samples']:.0f} samples, {r['wall_s']:.0f} s",
            flush=True,
        )
    gains = {p: r["held_out_reward_end"] - r["held_out_reward_start"] for p, r in results.items()}
    worst = min(gains.values())
    aims = {"min_gain": {"value": worst, "aim": AIM_GAIN, "met": worst >= AIM_GAIN}}
    report = {"bench": "presets", "values": {f"gain_{p}": g for p, g in gains.items()}, "aims": aims}
    if set(results) == set(NAMES):  # a part would hide the rest
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "presets.md").write_text(markdown(results))
        (RESULTS / "presets.json").write_text(json.dumps(report, indent=2) + "\n")
    else:
        print(markdown(results))
    print(json.dumps(report))


if __name__ == "__main__":
    app.run(main)
