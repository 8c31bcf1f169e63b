"""Environment-level asynchrony and redundant environments against batch rollouts, and predicted.

    python -m tests.bench.agentic [--small]

A real actor, learner and store, and real environments' processes (`actor/environments`), each of which sleeps what was
drawn for it at every step. Only the engine is a simulated one (`tests.bench.rig.paced_engine`) of a stated rate: what
is asked about is what is done with the time that environments take. `setups` says sizes and where they are from. What
is compared is the time from one update to the next, over episodes with the same draws and updates of as many:

* batch rollouts: all environments of a batch in lock-step, the engine generating for all of them, then all of them
  stepping, then again (ROLL's baseline, ROLL Flash section 5.2.1); trained and published when all have ended;
* each episode for itself, otherwise the same;
* the same in a window with an async ratio: as one ends, the next begins, and training is beside it;
* the same with redundant environments (section 5.2.2): 1.25 times as many prompts and samples, the first to end win.

All have as many environments at once as an update has episodes, but for the redundant ones, which have what eta asks
for. At each step an environment takes a time drawn from a normal distribution of mean 10 and the deviation of the line,
what is below 0 left out; time is scaled 1:100. Group size and batch are from the published system's examples, since the
text of the paper that we have gives none; turns and the engine's rate are ours (`setups`). Values are of the largest
deviation. The planner predicts each schedule from the distribution of the latencies and three calibration sessions: two
at another deviation, one of environments that answer at once. The schedules of a deviation take turns, four of each,
every second turn in reverse order, and each turn has draws of its own; a speed-up is the mean of the turns' ratios.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from tests.bench.agentic.measure import calibrate, run
from tests.bench.agentic.setups import ALONE, BATCH, DEVIATIONS_S, REDUNDANT, SETUPS, WINDOW
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import Estimate, ratio
from tests.bench.harness.sessions import TURNS
from tests.bench.harness.turns import in_turns

ACTOR = "tests.bench.agentic.play_process"
MEMORY = "/dev/shm"
"""Where the store is: time runs a hundred times as fast here, and a disk doesn't."""
COLUMNS = {
    "deviation": "{deviation:g}",
    "schedule": "{name}",
    "an update, s": "{updates_s:.2f}",
    "predicted, s": "{predicted_s:.2f}",
    "off": "{off:+.0%}",
    "speed-up": "{speedup:.2f}",
    "predicted speed-up": "{speedup_predicted:.2f}",
    "largest lag": "{max_lag}",
}


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = result.SMALL.value
    setups = [dataclasses.replace(s, groups=2, samples=4) for s in SETUPS] if small else list(SETUPS)
    rows: list[dict[str, Any]] = []
    with sessions.open_rig(BATCH.config(1), actor_module=ACTOR, folder=MEMORY) as rig:
        rig.run(setups[0].session(1, 0.0))  # compiles
        costs = calibrate(rig, setups[1])
        print(f"calibrated: {costs}", flush=True)
        for deviation_s in DEVIATIONS_S[-1:] if small else DEVIATIONS_S:
            turned: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
            for turn, setup, speed in in_turns(setups, 1 if small else TURNS):
                num_updates, seeded = 2 if small else 8 if setup.by_window else 4, dataclasses.replace(setup, seed=turn)
                row = run(rig, seeded, deviation_s, costs, num_updates=num_updates)
                turned[setup.name].append(row | {"machine_speed": speed})
                print(row, flush=True)
            of_deviation = [of_turns(turned[setup.name]) for setup in setups]
            speedups = compare(of_deviation)  # the last deviation is the largest
            rows += of_deviation
    result.finish(
        "agentic",
        __doc__,
        values=values_of(rows, speedups),
        aims={
            "speedup_redundant": result.at_least(2.72, "ROLL Flash, agentic tasks, which are others"),
            "planner_error": result.at_most(0.15),
        },
        rows=rows,
        columns=COLUMNS,
        notes=[
            f"In the calibration an episode took {1000 * costs.start_s:.1f} ms of the machine to start and "
            f"{1000 * costs.turn_s:.1f} ms a turn, which was {1000 * costs.delay_s:.1f} ms late besides."
        ],
        beside="one paced engine, its actor and the environments' processes, the learner on a core of its own",
        costs=dataclasses.asdict(costs),
    )


def of_turns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the row of a schedule: `updates_s` is the mean update of each turn."""
    return {
        **rows[-1],
        "updates_s": [statistics.fmean(row["updates_s"]) for row in rows],
        "machine_speed": [row["machine_speed"] for row in rows],
        "max_lag": max(row["max_lag"] for row in rows),
    }


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Estimate]:
    """Enters what each schedule of a deviation gains on the first, which is the batch rollout; returns it by name."""
    batch, speedups = rows[0], {}
    for row in rows:
        speedups[row["name"]] = ratio(batch["updates_s"], row["updates_s"])
        row["off"] = row["predicted_s"] / statistics.fmean(row["updates_s"]) - 1
        row["speedup"] = speedups[row["name"]].value
        row["speedup_predicted"] = batch["predicted_s"] / row["predicted_s"]
    return speedups


def values_of(rows: Sequence[Mapping[str, Any]], speedups: Mapping[str, Estimate]) -> dict[str, Any]:
    """Returns the speed-ups at the largest deviation, and the planner's largest error over all rows."""
    most = max(row["deviation"] for row in rows)
    by_name = {row["name"]: row for row in rows if row["deviation"] == most}
    values: dict[str, Any] = {}
    for key, setup in (("speedup_by_rounds", ALONE), ("speedup", WINDOW), ("speedup_redundant", REDUNDANT)):
        values |= {key: speedups[setup.name], f"{key}_predicted": by_name[setup.name]["speedup_predicted"]}
    return values | {"planner_error": max(abs(row["off"]) for row in rows), "deviation": most}


if __name__ == "__main__":
    app.run(main)
