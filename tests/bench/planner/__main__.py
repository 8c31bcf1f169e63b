"""`python -m tests.bench.planner`: the planner against PipelineRL's numbers, and against the benches' measured runs.

`tests.bench.planner.papers` predicts RolloutPipe and RollPacker.

The runs it is compared with are those that `tests.bench.overlap`, `tail`, `inflight` and `async_ratio` have left in
tests/bench/results/*.json, each with the profile measured beside that run. `max_rel_error_real` is of the first three,
and there only if all of them are; async_ratio's error has an aim of its own. The result's `values` are numbers by name;
the predictions that they are taken from are beside them.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import app

from tests.bench.planner import cases, pipelinerl, table
from tests.bench.planner.cases import Error
from tests.bench.rig import report

REQUIRED = ("overlap", "tail", "inflight")
"""What `max_rel_error_real` is about: without one of them there is none."""
BENCHES = (*REQUIRED, "async_ratio")
AIM_REAL, NEAR_PIPELINERL = 0.15, 0.07
"""Relative: of the measured runs, of async_ratio's too; of PipelineRL's."""


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


def at_most(value: float | None, aim: float) -> dict[str, Any]:
    """An aim that is met by a value no larger."""
    return {"value": value, "aim": aim, "met": value is not None and value <= aim}


def near(value: float | None, aim: float, within: float) -> dict[str, Any]:
    """An aim that is met by a value close enough to it."""
    return {"value": value, "aim": aim, "met": value is not None and abs(value - aim) <= within * aim}


def aims_of(values: dict[str, float]) -> dict[str, dict[str, Any]]:
    """By key; a value that could not be computed is null and met is false."""
    return {
        "max_rel_error_real": at_most(values.get("max_rel_error_real"), AIM_REAL),
        "max_rel_error_async_ratio": at_most(values.get("max_rel_error_async_ratio"), AIM_REAL),
        "pipelinerl_speedup": near(values["pipelinerl_speedup"], pipelinerl.PAPER["speedup"], NEAR_PIPELINERL),
    }


def main(argv: list[str]) -> None:
    """Computes all, writes the results, prints the tables and the JSON line."""
    del argv
    folder = pathlib.Path(report.RESULTS_DIR.value or report.RESULTS)
    real, missing = measured_runs(folder)
    closed, simulated = pipelinerl.closed(), pipelinerl.simulated()
    values = {
        **{name: error for name, error in real_errors(real).items() if error is not None},
        **{f"pipelinerl_{name}": value for name, value in simulated.items()},
        **{f"pipelinerl_closed_{name}": value for name, value in closed.items()},
        "benches_missing": len(missing),
        **report.conditions(),
    }
    aims = aims_of(values)
    data = {
        "missing": missing,
        "real": {bench: [dataclasses.asdict(e) for e in errors] for bench, errors in real.items()},
    }
    text = table.markdown(real, missing, closed, simulated, aims)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner.md").write_text(text)
    whole = {"bench": "planner", "values": values, "aims": aims, **data}
    (folder / "planner.json").write_text(json.dumps(whole, indent=2) + "\n")
    table.plot(real, simulated, folder / "planner.png")
    print(text)
    print(json.dumps({"bench": "planner", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
