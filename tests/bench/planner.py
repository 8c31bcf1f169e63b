"""`python -m tests.bench.planner`: the planner against two papers' numbers, and against the benches' measured runs.

The runs it is compared with are those that `tests.bench.overlap`, `tail`, `inflight` and `async_ratio` have left in
tests/bench/results/*.json, each with the profile measured in that run.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags

from tests.bench import cases, planner_pipelinerl, planner_rolloutpipe, planner_table
from tests.bench.cases import Error
from tests.bench.planner_rolloutpipe import CHOSEN, PAPER_S

_RESULTS = flags.DEFINE_string("results", "tests/bench/results", "Folder of the results: read, and written.")
_SCAN = flags.DEFINE_bool("scan", True, "Also predict RolloutPipe with other engines that fit its serial column.")

BENCHES = ("overlap", "tail", "inflight", "async_ratio")
AIM_REAL, NEAR_PIPELINERL, NEAR_ROLLOUTPIPE = 0.15, 0.07, 0.05


def measured_runs(folder: pathlib.Path) -> tuple[dict[str, list[Error]], dict[str, str]]:
    """(the planner's errors by bench, why a bench has none)."""
    found, missing = {}, {}
    for bench in BENCHES:
        path = folder / f"{bench}.json"
        if not path.is_file():
            missing[bench] = f"no {path.name}: run python -m tests.bench.{bench}"
            continue
        try:
            found[bench] = cases.errors(cases.read(path))
        except ValueError as e:
            missing[bench] = str(e)
    return found, missing


def near(value: float | None, aim: float, within: float) -> dict[str, Any]:
    """An aim that is met by a value close enough to it."""
    return {"value": value, "aim": aim, "met": value is not None and abs(value - aim) <= within * aim}


def aims_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By key; a value that could not be computed is null and met is false."""
    real = values["max_rel_error_real"]
    return {
        "max_rel_error_real": {"value": real, "aim": AIM_REAL, "met": real is not None and real <= AIM_REAL},
        "pipelinerl_speedup": near(values["pipelinerl_speedup"], planner_pipelinerl.PAPER["speedup"], NEAR_PIPELINERL),
        "cgp_s": near(values["cgp_s"], PAPER_S["cgp"], NEAR_ROLLOUTPIPE),
        "cgp_fgd_s": near(values["cgp_fgd_s"], PAPER_S["cgp_fgd"], NEAR_ROLLOUTPIPE),
    }


def main(argv: list[str]) -> None:
    """Computes all, writes the results, prints the tables and the JSON line."""
    del argv
    folder = pathlib.Path(_RESULTS.value)
    real, missing = measured_runs(folder)
    closed, simulated = planner_pipelinerl.closed(), planner_pipelinerl.simulated()
    prediction = planner_rolloutpipe.predict(CHOSEN)
    scanned = planner_rolloutpipe.scan() if _SCAN.value else []
    values = {
        "max_rel_error_real": cases.max_relative_error([e for errors in real.values() for e in errors]),
        "benches_without_runs": missing,
        "pipelinerl_speedup": simulated["speedup"],
        "pipelinerl_closed": closed,
        "pipelinerl_simulated": simulated,
        "cgp_s": prediction.total_s["cgp"],
        "cgp_fgd_s": prediction.total_s["cgp_fgd"],
        "rolloutpipe": dataclasses.asdict(prediction),
        "rolloutpipe_scan": [dataclasses.asdict(p) for p in scanned],
        "real": {bench: [dataclasses.asdict(e) for e in errors] for bench, errors in real.items()},
    }
    aims = aims_of(values)
    text = planner_table.markdown(real, missing, closed, simulated, prediction, scanned, aims)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner.md").write_text(text)
    (folder / "planner.json").write_text(json.dumps({"values": values, "aims": aims}, indent=2) + "\n")
    planner_table.plot(real, simulated, prediction, folder / "planner.png")
    print(text)
    print(json.dumps({"bench": "planner", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
