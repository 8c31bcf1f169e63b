"""The planner on RollPacker's and RolloutPipe's experiments, told their inputs only.

    python -m tests.bench.papers

What it is told, from which section, and what a paper leaves open is in `tests/bench/papers/inputs.py`, which was
written before its results were compared with what is published; nothing is fitted to that. Known were then: of
RollPacker's Table 2 the row of tail batching (1.30, 1.48, 2.21), what rewards add at 7B/8k (71 %) and the range of the
whole (2.03 to 2.56); of RolloutPipe the main times at R = 96 (659 s and 642 s) and reductions of at least 32.9, 37.6
and 42.3 % at R = 32, 64 and 96. Takes a quarter of an hour on two cores.

**RollPacker, Table 2**: speed-up over veRL, mean of the seeds at the central share of the lengths' spread that is the
prompt's; the paper doesn't say how much is. Each row has what those above it have. What the planner gets wrong: tail
batching gains too much, since a roofline has no overhead, where each real round also has prompts to compute, requests
to start and to abort, and caches to make room for. The stream trainer gains too much, since giving chips up costs
nothing here, where a migration takes up to 3 s (section 6.6), and half of the engines decode about as fast as all do.
The reward scheduler gains too little at 7B/8k: Table 1 has the rewards' share at 14B/16k alone.

**RollPacker, Figure 11**: rollout time over that without tail batching. Of the figure's numbers the text has three:
with both at 1.25 rollout is up to 3.9 times as fast, and up to 1.5 and 1.6 times as fast as with P or R fixed. With the
lengths' spread mostly the prompt's, racing a few prompts more alone does as well as both, where the paper has both
contribute: single responses stray from short prompts more than lognormal lengths have it.

**RolloutPipe**: time saved over Slime by an engine whose step a + b h is fitted to serial's rollouts at R = 32 and 96;
the text has ranges over the workloads, at R = 64 only those over all R. What the planner gets wrong: it says that two
groups at a time lose, or gain little, where the paper's gain 2.5 to 11.4 % over CGP. An engine fitted to serial alone
serves 16 sequences too slowly to feed the trainer; the paper's must have served 16 about as fast as all.
"""

import concurrent.futures
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from tests.bench.harness import page, result
from tests.bench.papers import inputs, rolloutpipe, rollpacker
from tests.bench.papers.rolloutpipe import Rounds

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


def rolloutpipe_rows(rounds: list[Rounds]) -> list[dict[str, Any]]:
    """Returns a row for each R with CGP alone and with FGD: the paper's range, and the predicted one by sigma."""
    rows = []
    for R, (low, high) in REDUCTION.items():
        share = CGP_SHARE[R]
        for name, published in (("cgp", (low * share[0], high * share[1])), ("cgp_fgd", (low, high))):
            row: dict[str, Any] = {"R": R, "name": name, "paper": _range(published)}
            for sigma in inputs.SIGMAS:
                row[f"sigma {sigma:g}"] = _range([r.reduction(name) for r in rounds if (r.R, r.sigma) == (R, sigma)])
            rows.append(row)
    return rows


def _range(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f} to {100 * max(values):.1f} %"


def main(argv: list[str]) -> None:
    """Computes all on all cores, writes the results, prints the JSON line."""
    del argv
    with concurrent.futures.ProcessPoolExecutor() as pool:
        tails = [pool.submit(tail_batching, share, seed) for share, seed in draws()]
        pipes = [pool.submit(rolloutpipe.predict, w, s) for s in inputs.SIGMAS for w in inputs.COMPUTE_S]
        found, rounds = [t.result() for t in tails], [r for p in pipes for r in p.result()]
    values, speedups = flat_values(found, rounds), central_speedups(found)
    others = [f for f in found if f.prompt_share != inputs.PROMPT_SHARES[0]]
    figure = [{"name": name, **of} for name, of in found[0].figure_11.items()]
    rounds_columns = {"R": "{R}", "": "{name}", "paper": "{paper}"}
    rounds_columns |= {f"sigma {s:g}": f"{{sigma {s:g}}}" for s in inputs.SIGMAS}
    result.finish(
        "papers",
        __doc__,
        values=values,
        aims={"table_2_max_rel_error": result.at_most(0.15, "ours, as of the measured runs")},
        rows=[
            {
                "setting": name,
                "row": row,
                "paper": published,
                "predicted": speedups[name][row],
                "off": speedups[name][row] / published - 1,
                "others": ", ".join(f"{f.speedups[name][row]:.2f} ({f.prompt_share:g})" for f in others),
            }
            for name, rows in TABLE_2.items()
            for row, published in rows.items()
        ],
        columns={
            "setting": "{setting}",
            "row": "{row}",
            "paper": "{paper:.2f}",
            "predicted": "{predicted:.2f}",
            "off": "{off:+.0%}",
            "other shares": "{others}",
        },
        notes=[
            page.table({"Figure 11": "{name}", **{n: f"{{{n}:.2f}}" for n in figure[0] if n != "name"}}, figure),
            page.table(rounds_columns, rolloutpipe_rows(rounds)),
        ],
        beside="the planner alone",
    )


if __name__ == "__main__":
    app.run(main)
