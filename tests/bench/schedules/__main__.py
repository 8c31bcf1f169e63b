"""Schedules under fuzz: random arrivals, failures and crashes, held against exactly-once training and the lag bound.

    python -m tests.bench.schedules [--schedules 1300] [--seed 0] [--small]

Each schedule draws a configuration (rounds, frontier, windows with an async ratio or a lag bound, whole groups and
single samples, races, filters, ring buffers, ESS stops), and runs 8 updates of it (`world.py`). Last come the tokens
that whole simulated runs waste at alpha 1, 2 and 4, on the stored profile of `tests.bench.async_ratio`. Ends in one
line of JSON.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging

from launch.tools.plan.sim.simulate import simulate
from tests.bench.planner import cases
from tests.bench.schedules.fuzz import RULES, fuzz

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


def main() -> None:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=1300, help="number of schedules")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--small", action="store_true", help="shows that it works; its numbers mean nothing")
    args = parser.parse_args()
    logging.set_verbosity(logging.FATAL)
    num = 13 if args.small else args.schedules
    found, problems = fuzz(range(args.seed, args.seed + num))
    values: dict[str, Any] = {"schedules": num, "seed": args.seed} | dataclasses.asdict(found)
    values |= {"problems": problems[:20], "wasted": wasted(num_updates=10 if args.small else 60)}
    aims = {name: {"value": values[name], "aim": "0", "met": values[name] == 0} for name in RULES}
    print(json.dumps({"bench": "schedules", "values": values, "aims": aims}))


if __name__ == "__main__":
    main()
