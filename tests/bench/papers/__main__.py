"""The planner on the experiments of four papers, told their inputs only

    python -m tests.bench.papers -j 2

Each module of `tests/bench/papers/` has a paper's inputs, each with its section, and what the paper leaves open. They
are committed before the answers are read; `tests/bench/papers/answers.py` has what the papers state, and came after.
`--compare` computes errors of the stored predictions again, without predicting.

An error is |predicted / paper - 1|; of a range, the distance to its nearest bound. Where a paper states the share of a
time that is saved, the times are compared (1 - share): a share near 0 has no error that means anything.

Experiments chosen in sight, whose inputs were changed after the answers were read, count in no aim. Blind: none of an
experiment's answers was read before its inputs were committed. Known was, from earlier versions of this bench and an
audit: RollPacker's Table 2, Figures 9, 11 and 14 and Table 3, RolloutPipe's main times and dispatches, all of
PipelineRL and ROLL Flash. RollPacker's introduction, which sums up its sections 6.4 and 6.5, was read after their
inputs were written, but before they were committed: they are not blind.
"""

import concurrent.futures
import statistics
from collections.abc import Mapping
from typing import Any

from absl import app, flags, logging

from tests.bench.harness import page, result
from tests.bench.harness.benches import BENCHES
from tests.bench.harness.code import code_hash
from tests.bench.papers import pipelinerl, roll_flash, rolloutpipe, rollpacker_figures
from tests.bench.papers.answers import ANSWERS, NOT_COMPARED, WRONG
from tests.bench.papers.experiment import Experiment, error

_JOBS = flags.DEFINE_integer("jobs", 1, "Experiments that run at the same time.", short_name="j")
_COMPARE = flags.DEFINE_bool("compare", False, "Compare the stored predictions; predict nothing.")
EXPERIMENTS: tuple[Experiment, ...] = (
    *rollpacker_figures.EXPERIMENTS,
    *pipelinerl.EXPERIMENTS,
    *rolloutpipe.EXPERIMENTS,
    *roll_flash.EXPERIMENTS,
)
PREDICTING = ("inputs", "pipelinerl", "roll_flash", "rolloutpipe", "rollpacker", "rollpacker_figures")
"""Files whose change makes stored predictions outdated, beside the planner's."""
AIMS = {
    "median_error": result.at_most(0.10, "ours"),
    "max_error": result.at_most(0.25, "ours"),
}
COLUMNS = {
    "experiment": "{experiment}",
    "quantity": "{quantity}",
    "paper": "{stated}",
    "predicted": "{predicted:.4g}",
    "error": "{error:.0%}",
    "blind": "{blind}",
    "chosen in sight": "{in_sight}",
}


def predict(name: str) -> dict[str, float]:
    logging.set_verbosity(logging.WARNING)  # a line per dropped group
    (experiment,) = [e for e in EXPERIMENTS if e.name == name]
    return dict(experiment.predict())


def compare(predictions: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Returns a row for each predicted number; without an answer it has no error."""
    rows = []
    for experiment in EXPERIMENTS:
        answers = ANSWERS.get(experiment.name, {})
        if unknown := answers.keys() - predictions[experiment.name].keys():
            raise ValueError(f"{experiment.name}: answers to quantities that are not predicted: {sorted(unknown)}")
        for quantity, predicted in predictions[experiment.name].items():
            published = answers.get(quantity)
            stated = None if published is None else page.number(published)
            rows.append(
                {
                    "experiment": experiment.name,
                    "quantity": quantity,
                    "stated": stated,
                    "predicted": predicted,
                    "error": None if published is None else error(predicted, published),
                    "blind": experiment.blind,
                    "in_sight": experiment.in_sight,
                }
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the median and the largest error: of all inputs that were not chosen in sight, of the blind experiments,
    of each paper, and of inputs chosen in sight."""
    values: dict[str, float] = {"num_predictions": len(rows)}
    frozen = [r for r in rows if not r["in_sight"]]
    parts = {"": frozen, "blind_": [r for r in frozen if r["blind"]], "in_sight_": [r for r in rows if r["in_sight"]]}
    for paper in dict.fromkeys(e.paper for e in EXPERIMENTS):
        key = paper.lower().replace(" ", "_") + "_"
        parts[key] = [r for r in frozen if r["experiment"].startswith(f"{paper}, ")]
    for prefix, of in parts.items():
        errors = [r["error"] for r in of if r["error"] is not None]
        values[f"{prefix}num_compared"] = len(errors)
        if errors:
            values |= {f"{prefix}median_error": statistics.median(errors), f"{prefix}max_error": max(errors)}
    return values


def main(argv: list[str]) -> None:
    """Predicts all, compares, writes the results, prints the JSON line."""
    del argv
    code = code_hash((*BENCHES["papers"].code, *(f"tests/bench/papers/{name}.py" for name in PREDICTING)))
    if _COMPARE.value:
        stored = result.stored("papers")
        if stored is None or "predictions" not in stored:
            raise SystemExit("no stored predictions; run python -m tests.bench.papers")
        predictions = stored["predictions"]
        made = stored.get("predicted")
        if made is None:
            names = {"made": stored["made"], "commit": stored["commit"], "s": stored["values"]["wall_s"]}
            made = names | {"code": stored["predicting_code"]}
        if made["code"] != code:
            raise SystemExit("the stored predictions are of other code; run python -m tests.bench.papers")
    else:
        made = None
        with concurrent.futures.ProcessPoolExecutor(_JOBS.value) as pool:
            names = [e.name for e in EXPERIMENTS]
            predictions = dict(zip(names, pool.map(predict, names), strict=True))
    rows = compare(predictions)
    opened = [{"name": e.name, "open": e.left_open} for e in EXPERIMENTS if e.left_open]
    result.finish(
        "papers",
        __doc__,
        values=summary(rows),
        aims=AIMS,
        rows=rows,
        columns=COLUMNS,
        notes=[
            *([f"Predicted {made['made']} at commit {made['commit']}, in {made['s']:.0f} s."] if made else []),
            *WRONG,
            page.table({"experiment": "{name}", "left open by the paper, and assumed": "{open}"}, opened),
            page.table({"not compared": "{0}", "why": "{1}"}, [{"0": k, "1": v} for k, v in NOT_COMPARED.items()]),
        ],
        beside="the planner alone",
        predictions=predictions,
        predicted=made,
        predicting_code=code,
    )


if __name__ == "__main__":
    app.run(main)
