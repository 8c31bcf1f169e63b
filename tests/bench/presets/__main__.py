"""Do all presets learn, and does any pay for its speed? Each at tiny size, the same number of trained samples.

    python -m tests.bench.presets [--only=serial,window_tis,...] [--updates=240] [--dir=FOLDER]

Runs the main job once a case (`tests.bench.presets.cases`), one after the other: some three minutes each. A finished
run stays in its folder and is taken from there, if it was made by the same code, so the bench may be stopped, go on,
and be run in parts; each part ends with all that is there. Once nothing is missing it writes
`tests/bench/results/presets.{md,json}`.
"""

import json
import pathlib

from absl import app, flags

from configs.run_folder import RunFolder
from learner.metrics.metrics_writer import read_rows
from tests.bench.job import PROJECT, asked_for, finished_run, run_job
from tests.bench.presets import table
from tests.bench.presets.cases import CASES, Case

RESULTS = PROJECT / "tests" / "bench" / "results"

_ONLY = flags.DEFINE_list("only", [], "Cases to run; all that are not finished if not given.")
_UPDATES = flags.DEFINE_integer("updates", 240, "Updates of 128 samples each.", lower_bound=2)
_DIR = flags.DEFINE_string("dir", str(PROJECT / "runs" / "bench-presets"), "Where the runs go, and stay.")


def run_one(case: Case, folder: pathlib.Path, *, num_updates: int) -> dict:
    """One run's summary, and what its metrics add up to."""
    summary = run_job(*asked(case, num_updates), folder, reuse=True)
    return summary | read_metrics(folder)


def asked(case: Case, num_updates: int) -> tuple[str, dict[str, object]]:
    """The preset's file, and the fields that differ from it."""
    return f"{case.preset}:tiny", {"run.num_updates": num_updates} | case.arguments


def read_metrics(folder: pathlib.Path) -> dict:
    """What the page wants of a run beside its summary."""
    rows = read_rows(RunFolder(folder).metrics)
    steps = [row for row in rows if row["kind"] == "step"]
    return {
        "trained_samples": sum(row["sequences"] for row in steps),
        "dropped": steps[-1]["groups/dropped"],
        "mismatch_kl": sum(row["mismatch_kl_k3"] for row in steps) / len(steps),
        "max_parity": max((row["parity/max_abs_dlogprob"] for row in rows if row["kind"] == "probe"), default=None),
    }


def finished(root: pathlib.Path, *, num_updates: int) -> dict[str, dict]:
    """All finished runs of this code in the folder, by case, in the table's order."""
    found = {}
    for name, case in CASES.items():
        summary = finished_run(root / name, asked_for(*asked(case, num_updates)))
        if summary is not None:
            found[name] = summary | read_metrics(root / name)
    return found


def main(argv: list[str]) -> None:
    """Runs what is asked for, writes the table, prints the JSON line."""
    del argv
    root = pathlib.Path(_DIR.value)
    unknown = [name for name in _ONLY.value if name not in CASES]
    if unknown:
        raise app.UsageError(f"--only: no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name in _ONLY.value or CASES:
        r = run_one(CASES[name], root / name, num_updates=_UPDATES.value)
        print(
            f"{name}: {r['held_out_reward_start']:.3f} -> {r['held_out_reward_end']:.3f}, "
            f"{r['trained_samples']:.0f} samples, {r['wall_s']:.0f} s",
            flush=True,
        )
    results = finished(root, num_updates=_UPDATES.value)
    values = table.values_of(results)
    report = {"bench": "presets", "values": values, "aims": table.aims_of(values)}
    page = table.markdown(results)
    if len(results) == len(CASES):  # a part would hide the rest
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "presets.md").write_text(page)
        (RESULTS / "presets.json").write_text(json.dumps(report, indent=2) + "\n")
    else:
        print(page)
    print(json.dumps(report))


if __name__ == "__main__":
    app.run(main)
