"""`python -m tests.bench.planner`: the planner against two papers' numbers, and against the benches' measured runs.

The runs it is compared with are those that `tests.bench.overlap`, `tail`, `inflight` and `async_ratio` have left in
tests/bench/results/*.json, each with the profile measured beside that run. `max_rel_error_real` is of the first three,
and there only if all of them are; async_ratio's error is reported by itself.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags

from tests.bench.planner import cases, pipelinerl, rolloutpipe, table
from tests.bench.planner.cases import Error
from tests.bench.planner.rolloutpipe import PAPER_S, RATIOS, SHAPES, spread
from tests.bench.rig import report

_SWEEP = flags.DEFINE_bool(
    "sweep", True, "Also predict RolloutPipe with the other engines and ratios that fit its serial column."
)

REQUIRED = ("overlap", "tail", "inflight")
"""What `max_rel_error_real` is about: without one of them there is none."""
BENCHES = (*REQUIRED, "async_ratio")
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


def real_errors(real: dict[str, list[Error]]) -> dict[str, float | None]:
    """The largest relative error of each bench, and of all required ones together, if they are all there."""
    by_bench = {bench: cases.max_relative_error(real.get(bench, [])) for bench in BENCHES}
    required = [error for bench in REQUIRED if (error := by_bench[bench]) is not None]
    whole = max(required) if len(required) == len(REQUIRED) else None
    return {"max_rel_error_real": whole} | {f"max_rel_error_{bench}": error for bench, error in by_bench.items()}


def near(value: float | None, aim: float, within: float) -> dict[str, Any]:
    """An aim that is met by a value close enough to it."""
    return {"value": value, "aim": aim, "met": value is not None and abs(value - aim) <= within * aim}


def aims_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By key; a value that could not be computed is null and met is false."""
    real = values["max_rel_error_real"]
    return {
        "max_rel_error_real": {"value": real, "aim": AIM_REAL, "met": real is not None and real <= AIM_REAL},
        "pipelinerl_speedup": near(values["pipelinerl_speedup"], pipelinerl.PAPER["speedup"], NEAR_PIPELINERL),
        "cgp_s": near(values["cgp_s"], PAPER_S["cgp"], NEAR_ROLLOUTPIPE),
        "cgp_fgd_s": near(values["cgp_fgd_s"], PAPER_S["cgp_fgd"], NEAR_ROLLOUTPIPE),
    }


def main(argv: list[str]) -> None:
    """Computes all, writes the results, prints the tables and the JSON line."""
    del argv
    folder = pathlib.Path(report.RESULTS_DIR.value or report.RESULTS)
    real, missing = measured_runs(folder)
    closed, simulated = pipelinerl.closed(), pipelinerl.simulated()
    central = rolloutpipe.predict()
    assert central is not None  # its test says that it calibrates
    swept = rolloutpipe.sweep() if _SWEEP.value else [central]
    ranges = {name: spread(swept, name) for name in PAPER_S}
    values = {
        **real_errors(real),
        "benches_without_runs": missing,
        "pipelinerl_speedup": simulated["speedup"],
        "pipelinerl_closed": closed,
        "pipelinerl_simulated": simulated,
        "cgp_s": central.total_s["cgp"],
        "cgp_s_min": ranges["cgp"][0],
        "cgp_s_max": ranges["cgp"][1],
        "cgp_fgd_s": central.total_s["cgp_fgd"],
        "cgp_fgd_s_min": ranges["cgp_fgd"][0],
        "cgp_fgd_s_max": ranges["cgp_fgd"][1],
        "rolloutpipe": dataclasses.asdict(central),
        "rolloutpipe_sweep": [dataclasses.asdict(p) for p in swept],
        "rolloutpipe_sweep_tried": len(SHAPES) * len(RATIOS) if _SWEEP.value else 1,
        **report.conditions(),
        "real": {bench: [dataclasses.asdict(e) for e in errors] for bench, errors in real.items()},
    }
    aims = aims_of(values)
    text = table.markdown(real, missing, closed, simulated, central, swept, aims)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner.md").write_text(text)
    (folder / "planner.json").write_text(json.dumps({"values": values, "aims": aims}, indent=2) + "\n")
    table.plot(real, simulated, central, swept, folder / "planner.png")
    print(text)
    print(json.dumps({"bench": "planner", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
