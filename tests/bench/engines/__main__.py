"""Queue scheduling, prompt replication, redundant samples and tail batching over 16 engines, and predicted.

    python -m tests.bench.engines [--small]

16 simulated engines, each with a real actor, one real learner, a real store between (`tests.bench.engines.setups` says
which engines, lengths and sizes; all were chosen before anything was run). Each pair of schedules serves the same
prompts and lengths; the planner (`launch.tools.plan`) predicts each from the engines' profile and the lengths alone.
The schedules take turns, four of each, every second turn in reverse order, and each turn has prompts of its own. A
speed-up is the mean of the turns' ratios.

* queue scheduling (ROLL Flash, section 5.1) against the batch rollout that it replaces (`batch_rollout`), with groups
  without variance filtered out, by what a round's rollout takes: alone, and with 16 redundant prompts, the setting of
  the aim. Two rounds of three are short ones, and the third is of what they left;
* prompt replication: samples as tickets of their own against whole groups, by the same;
* redundant samples: 1.25 K requests for K samples against K, by the same, where stragglers are a sample's own;
* tail batching (RollPacker, section 3) against `serial`, by what a round takes with its training, which begins in both
  when the rollout is complete: as in Table 2, whose 1.48 at 14B/16k is veRL's time over veRL's with tail batching;
* tail batching trained as its groups come, against the same `serial`: two mechanisms, and no aim, as the paper gives
  no number for these two. Its 2.03 to 2.56 end to end (2.22 at 14B/16k) have a reward scheduler and parallelism that
  changes besides; its trainer, which moves GPUs from rollout to training too, brings 2.02 to 2.22 there. Hiding
  training behind the rollout alone can gain 1 / WAITING_RATIO.

Tail batching's rounds are a period of four short ones and a long one in each turn; `serial` has as many. The last two
schedules are run once, to see that they work on a fleet.

A round is from its first ticket to its last group in the store; of the schedules that are compared with training, to
its last update. The planner is told the engines' profile, the lengths of each prompt's responses and, where there is
training, what it cost in the calibration; nothing measured is in its input. It has not: the time from a response's end
to the next claim, and how late the fleet's process was, since all actors share a core here.

Ideal is an event simulation that shares no code with system or planner (`oracle`): every request goes at once to the
engine that runs the fewest, and nothing but tokens takes time: trained ones what they took in the calibration. It is
what the setting can show; an aim above it can't be met in this setting. Settings were chosen before anything was run,
but for the redundant prompts: queue scheduling alone had an ideal of 1.6 to 2.0, below its aim, so the pair of the aim
was chosen anew by the ideal. `*_gain_share` is how much of that gain each pair got.

The batch rollout runs on the engines themselves, without store, claims or a learner beside it, so queue scheduling pays
for more than what it is compared with.
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from launch.tools.plan.profile import LearnerProfile, PublishProfile
from tests.bench.engines.measure import run_batches, run_rollouts, run_training
from tests.bench.engines.setups import NUM_ENGINES, PAIRS, QUEUE_REDUNDANT, ROLL_FLASH, ROLLOUTPIPE, SERIAL, TRAINED
from tests.bench.harness import machine, result, sessions
from tests.bench.harness.estimates import ratio
from tests.bench.harness.sessions import TURNS
from tests.bench.harness.turns import in_turns
from tests.bench.planner.measure import learner_costs, publish_costs
from tests.bench.rig.calibrate import calibrate

FLEET = "tests.bench.engines.fleet_process"
WAITING_RATIO = (0.72, 0.78)
"""Of `serial`: the share of a synchronous step that is rollout (RollPacker Table 1: 66 to 72 %, and reward 5 to 13)."""
AIMS = {
    "queue_scheduling_speedup": result.at_least(2.4, "ROLL Flash, the least of Figure 7; setting chosen by its ideal"),
    "replication_speedup": result.at_least(1.1, "ours"),
    "redundant_speedup": result.at_least(1.1, "ours"),
    "rollpacker_speedup": result.at_least(1.48, "RollPacker, Table 2, tail batching alone at 14B/16k"),
}
MEMORY = "/dev/shm"
"""Where the store is: time runs `SPEED` times as fast here, and a disk doesn't. What it costs is `tests.bench.store`'s
question."""
PERIOD = 5
"""Rounds of tail batching at eta = 1.25: four short ones and a long one (RollPacker, Figure 4)."""
REDUNDANT_PERIOD = 3
"""Rounds until 16 redundant prompts of each are a round of 32."""
COLUMNS = {
    "schedule": "{name}",
    "a round, s": "{rounds_s:.2f}",
    "predicted, s": "{predicted_s:.2f}",
    "ideal, s": "{ideal_s:.2f}",
    "against": "{before}",
    "speed-up": "{speedup:.2f}",
    "predicted speed-up": "{speedup_predicted:.2f}",
    "ideal speed-up": "{speedup_ideal:.2f}",
    "tickets an engine": "{tickets}",
    "largest lag": "{max_lag}",
    "fleet late, s": "{late_s:.3f}",
}


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    num_rollouts, turns, tries = (1, 1, 2) if result.SMALL.value else (2, TURNS, 3)
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    with sessions.open_rig(SERIAL.config(1, num_engines=1), actor_module=FLEET, folder=MEMORY) as rig:
        rig.run(SERIAL.session(1))  # compiles
        calibration = calibrate(rig, {"serial": SERIAL.session(2)}, bounds=WAITING_RATIO, tries=tries)
        # What training and publishing cost, from the calibration's session: it ran beside the same fleet.
        ran, passes = list(calibration.results.values()), calibration.passes_per_token
        learner, publish = LearnerProfile(**learner_costs(ran)), PublishProfile(**publish_costs(ran))
        compared = list({setup.name: setup for pair in PAIRS.values() for setup in pair}.values())
        others = [(0, setup, machine.speed()) for setup in (ROLLOUTPIPE, ROLL_FLASH)]
        for turn, setup, speed in itertools.chain(in_turns(compared, turns), others):
            seeded = dataclasses.replace(setup, seed=turn)
            if setup.is_batch_rollout:
                row = run_batches(rig, seeded, num_rollouts)
            elif setup in compared and setup not in TRAINED:
                row = run_rollouts(rig, seeded, REDUNDANT_PERIOD if setup is QUEUE_REDUNDANT else num_rollouts)
            else:
                row = run_training(rig, seeded, PERIOD if setup in TRAINED else 1, passes, learner, publish)
            found[setup.name].append(row | {"machine_speed": speed})
            print(f"{setup.name}: {row['rounds_s']} s, predicted {row['predicted_s']:.2f} s", flush=True)
    rows = {name: of_turns(turned) for name, turned in found.items()}
    result.finish(
        "engines",
        __doc__,
        values=values_of(rows) | calibration.values(),
        aims=AIMS,
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=calibration.notes(),
        beside=f"{NUM_ENGINES} simulated engines and their actors on one core, the learner on the other",
    )


def of_turns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the row of a schedule: `rounds_s` is the mean round of each turn."""
    return {
        **rows[-1],
        "rounds_s": [statistics.fmean(row["rounds_s"]) for row in rows],
        "predicted_s": statistics.fmean(row["predicted_s"] for row in rows),
        "ideal_s": None if rows[0]["ideal_s"] is None else statistics.fmean(row["ideal_s"] for row in rows),
        "machine_speed": [row["machine_speed"] for row in rows],
        **{key: max(row[key] for row in rows) for key in ("late_s", "max_lag") if key in rows[0]},
    }


def values_of(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns each pair's speed-up, measured, predicted and ideal, and enters them into the rows."""
    values: dict[str, Any] = {}
    off = []
    for key, (before, after) in PAIRS.items():
        slow, fast = rows[before.name], rows[after.name]
        speedup = ratio(slow["rounds_s"], fast["rounds_s"])
        fast |= {"before": before.name, "speedup": speedup.value}
        fast["speedup_predicted"] = slow["predicted_s"] / fast["predicted_s"]
        fast["speedup_ideal"] = slow["ideal_s"] / fast["ideal_s"]
        values |= {key: speedup, f"{key}_predicted": fast["speedup_predicted"], f"{key}_ideal": fast["speedup_ideal"]}
        values[f"{key}_gain_share"] = (speedup.value - 1) / (fast["speedup_ideal"] - 1)
        off += [abs(row["predicted_s"] / statistics.fmean(row["rounds_s"]) - 1) for row in (slow, fast)]
    late_s = max(row.get("late_s", 0.0) for row in rows.values())
    return values | {"num_engines": NUM_ENGINES, "largest_prediction_error": max(off), "late_s": late_s}


if __name__ == "__main__":
    app.run(main)
