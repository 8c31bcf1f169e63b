"""Schedules under fuzz: random arrivals, failures and crashes, held against exactly-once training and the lag bound.

    python -m tests.bench.schedules [--schedules 1300] [--seed 0] [--small]

Each schedule draws a configuration (rounds, frontier, windows with an async ratio or a lag bound, whole groups and
single samples, races, filters, ring buffers, ESS stops), and runs 8 updates of it (`tests/bench/schedules/world.py`).
Last come the tokens that whole simulated runs waste at alpha 1, 2 and 4, on the stored profile of
`tests.bench.async_ratio`.
"""

import dataclasses
import pathlib
from typing import Any

from absl import app, flags, logging

from launch.tools.plan.sim.simulate import simulate
from tests.bench.harness import result
from tests.bench.planner import cases
from tests.bench.schedules.fuzz import RULES, fuzz

_SCHEDULES = flags.DEFINE_integer("schedules", 1300, "Number of schedules.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the first schedule.")
PROFILE = pathlib.Path("tests/bench/results/async_ratio.json")


def wasted(*, num_updates: int) -> dict[str, dict[str, float]]:
    """Tokens that whole runs waste, by async ratio and unit: aborted ones, and those of groups dropped as stale."""
    found: dict[str, dict[str, float]] = {}
    for case in cases.read(PROFILE):
        if case.name not in ("alpha_1", "alpha_2", "alpha_4"):
            continue
        for unit in ("group", "sample"):
            admission = dataclasses.replace(case.config.admission, unit=unit)
            outcome = simulate(
                dataclasses.replace(case.config, admission=admission), case.profile, num_updates=num_updates
            )
            found[f"{case.name}_{unit}"] = {
                "aborted_tokens": round(outcome.wasted_tokens),
                "aborted_per_trained_token": round(outcome.wasted_tokens / (outcome.tokens_per_s * outcome.seconds), 3),
                "stale_groups": outcome.num_dropped.get("stale", 0),
                "tokens_per_s": round(outcome.tokens_per_s),
            }
    return found


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    logging.set_verbosity(logging.FATAL)
    num, seed = 13 if result.SMALL.value else _SCHEDULES.value, _SEED.value
    found, problems = fuzz(range(seed, seed + num))
    values: dict[str, Any] = {"schedules": num, "seed": seed} | dataclasses.asdict(found)
    values |= {"problems": problems[:20], "wasted": wasted(num_updates=10 if result.SMALL.value else 60)}
    result.finish(
        "schedules",
        __doc__,
        values=values,
        aims=dict.fromkeys(RULES, result.at_most(0)),
        rows=[{"name": name, **numbers} for name, numbers in values["wasted"].items()],
        columns={
            "waste": "{name}",
            "aborted tokens": "{aborted_tokens}",
            "per trained token": "{aborted_per_trained_token:.3f}",
            "stale groups": "{stale_groups}",
            "tokens/s": "{tokens_per_s}",
        },
        beside="nothing else of ours",
    )


if __name__ == "__main__":
    app.run(main)
