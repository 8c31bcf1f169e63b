"""`python -m tests.bench.planner.papers`: the planner on RollPacker's and RolloutPipe's experiments, told nothing else.

What it is told is `tests/bench/planner/inputs.py`, which was written before its results were compared with what is
published; nothing is fitted to that. Writes `results/papers.{md,json}`; takes a quarter of an hour on two cores.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from absl import app

from tests.bench.planner import inputs, papers_table, rolloutpipe_rounds, rollpacker
from tests.bench.planner.rolloutpipe_rounds import Rounds
from tests.bench.rig import report

AIM = 0.15
"""As of the measured runs: the largest relative error."""
TABLE_2: Mapping[str, Mapping[str, float]] = {
    "7B/8k": {rollpacker.TAIL: 1.30, rollpacker.REWARD: 2.01, rollpacker.STREAM: 2.03},
    "14B/16k": {rollpacker.TAIL: 1.48, rollpacker.REWARD: 1.99, rollpacker.STREAM: 2.22},
    "32B/32k": {rollpacker.TAIL: 2.21, rollpacker.REWARD: 2.48, rollpacker.STREAM: 2.56},
}
"""RollPacker's speedups over veRL. Its row of the parallelism planner (2.01, 2.02, 2.52) is left out: the planner here
has no elastic engines."""
REDUCTION: Mapping[int, tuple[float, float]] = {32: (0.307, 0.329), 64: (0.307, 0.423), 96: (0.398, 0.423)}
"""RolloutPipe's, of CGP+FGD over four workloads (section 5.2); at R = 64 only the range over all R is in the text."""
CGP_SHARE: Mapping[int, tuple[float, float]] = {32: (0.71, 0.79), 64: (0.71, 0.96), 96: (0.92, 0.96)}
"""Of that, CGP's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailBatching:
    """One draw of RollPacker's three settings."""

    prompt_share: float
    seed: int
    speedups: dict[str, dict[str, float]]
    """By setting and row of Table 2."""
    figure_11: dict[str, dict[str, float]]
    """By setting and configuration; of the first draw only."""


def tail_batching(prompt_share: float, seed: int) -> TailBatching:
    """Simulates all."""
    settings = {s.name: s for s in inputs.SETTINGS}
    costs = rollpacker.costs_of(settings[inputs.CALIBRATED], prompt_share=prompt_share, seed=seed)
    rows = {n: rollpacker.table_2(s, costs, prompt_share=prompt_share, seed=seed) for n, s in settings.items()}
    figure = {}
    if (prompt_share, seed) == draws()[0]:
        figure = {n: rollpacker.figure_11(s, prompt_share=prompt_share, seed=seed) for n, s in settings.items()}
    return TailBatching(
        prompt_share=prompt_share,
        seed=seed,
        speedups={n: rollpacker.speedups(steps) for n, steps in rows.items()},
        figure_11=figure,
    )


def draws() -> list[tuple[float, int]]:
    """(share of the prompt, seed): all seeds for the central share, one for each other."""
    central, *others = inputs.PROMPT_SHARES
    return [(central, seed) for seed in inputs.SEEDS] + [(share, inputs.SEEDS[0]) for share in others]


def central_speedups(found: list[TailBatching]) -> dict[str, dict[str, float]]:
    """The mean over the seeds of the central share."""
    mine = [f.speedups for f in found if f.prompt_share == inputs.PROMPT_SHARES[0]]
    return {n: {row: statistics.fmean(f[n][row] for f in mine) for row in rows} for n, rows in TABLE_2.items()}


def flat_values(found: list[TailBatching], rounds: list[Rounds]) -> dict[str, float]:
    """Every number by a name of its own."""
    speedups = central_speedups(found)
    short = {rollpacker.TAIL: "tail", rollpacker.REWARD: "reward", rollpacker.STREAM: "stream"}
    values = {f"table_2_{n}_{short[row]}": v for n, rows in speedups.items() for row, v in rows.items()}
    off = [speedups[n][row] / paper - 1 for n, rows in TABLE_2.items() for row, paper in rows.items()]
    values |= {"table_2_max_rel_error": max(map(abs, off)), "table_2_mean_rel_error": statistics.fmean(off)}
    values |= {f"figure_11_{n}_P_R_1.25": f["P, R 1.25"] for n, f in found[0].figure_11.items()}
    for r in (r for r in rounds if r.sigma == inputs.SIGMAS[0]):
        values |= {f"reduction_{r.workload}_R{r.R}_{name}": r.reduction(name) for name in ("cgp", "cgp_fgd")}
    return values


def aims_of(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Of Table 2, whose nine numbers are published one by one; RolloutPipe's are ranges."""
    error = values["table_2_max_rel_error"]
    return {"table_2_max_rel_error": {"value": error, "aim": AIM, "met": error <= AIM}}


def main(argv: list[str]) -> None:
    """Computes all on all cores, writes the results, prints the page and the JSON line."""
    del argv
    with concurrent.futures.ProcessPoolExecutor() as pool:
        tails = [pool.submit(tail_batching, share, seed) for share, seed in draws()]
        pipes = [pool.submit(rolloutpipe_rounds.predict, w, s) for s in inputs.SIGMAS for w in inputs.COMPUTE_S]
        write([t.result() for t in tails], [r for p in pipes for r in p.result()])


def write(found: list[TailBatching], rounds: list[Rounds]) -> None:
    """The page and the numbers."""
    values = flat_values(found, rounds)
    aims = aims_of(values)
    text = papers_table.markdown(found, rounds, central_speedups(found), TABLE_2, REDUCTION, CGP_SHARE, aims)
    folder = pathlib.Path(report.RESULTS_DIR.value or report.RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "papers.md").write_text(text)
    (folder / "papers.json").write_text(json.dumps({"values": values, "aims": aims}, indent=2) + "\n")
    print(text)
    print(json.dumps({"bench": "papers", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
