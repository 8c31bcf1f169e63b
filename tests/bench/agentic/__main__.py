"""Environment-level asynchrony and redundant environments against batch rollouts, and predicted.

    python -m tests.bench.agentic [--small]

A real actor, learner and store, and real environments' processes (`actor.environments`), each of which sleeps what was
drawn for it at every step. Only the engine is a simulated one (`tests.bench.rig.paced_engine`) of a stated rate: what
is asked about is what is done with the time that environments take. `setups` says sizes and where they are from. What
is compared is the time from one update to the next, over episodes with the same draws and updates of as many:

* batch rollouts: all environments of a batch in lock-step, the engine generating for all of them, then all of them
  stepping, then again (ROLL's baseline, ROLL Flash section 5.2.1); trained and published when all have ended;
* each episode for itself, otherwise the same;
* the same in a window with an async ratio: as one ends, the next begins, and training is beside it;
* the same with redundant environments (section 5.2.2): 1.25 times as many prompts and samples, the first to end win.

The planner predicts each from the distribution of the latencies and three calibration sessions: two at another
deviation, one of environments that answer at once.
Takes some eight minutes. Writes `results/agentic.{json,md}`.
"""

import dataclasses
import pathlib
import tempfile

from absl import app

from tests.bench.agentic.measure import Costs, Row, calibrate, run, to_json
from tests.bench.agentic.setups import (
    ALONE,
    ALPHA,
    BATCH,
    DEVIATIONS_S,
    ETA,
    MEAN_S,
    NUM_TURNS,
    REDUNDANT,
    SETUPS,
    SPEED,
    TOKENS_PER_S,
    TURN_TOKENS,
    WINDOW,
    K,
    Setup,
    U,
)
from tests.bench.rig import report
from tests.bench.rig.rig import Rig
from tests.bench.rig.setting import tiny_model

ACTOR = "tests.bench.agentic.play_process"
MEMORY = "/dev/shm"
"""Where the store is: time runs a hundred times as fast here, and a disk doesn't."""
AIM, ERROR = 2.72, 0.15
"""ROLL Flash's agentic speed-up; what the planner may be off."""


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    small = report.SMALL.value
    setups = [dataclasses.replace(s, groups=2, samples=4) for s in SETUPS] if small else list(SETUPS)
    deviations = DEVIATIONS_S[-1:] if small else DEVIATIONS_S
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="sluice-agentic-", dir=MEMORY) as folder,
        Rig(pathlib.Path(folder), BATCH.config(1), tiny_model(), actor_module=ACTOR) as rig,
    ):
        rig.run(setups[0].session(1, 0.0))  # compiles
        costs = calibrate(rig, setups[1])
        print(f"calibrated: {costs}", flush=True)
        for deviation_s in deviations:
            for setup in setups:
                num_updates = 2 if small else 16 if setup.by_window else 8
                row = run(rig, setup, deviation_s, costs, num_updates=num_updates)
                print(
                    f"{deviation_s * SPEED:g} {row.name}: {row.mean_s:.2f} s, predicted {row.predicted_s:.2f} s",
                    flush=True,
                )
                rows.append(row)
    values = values_of(rows)
    report.finish(
        "agentic",
        title="Environments: each for itself, and redundant ones",
        about=about(costs),
        table=table_of(rows),
        remarks=remarks_of(values),
        values=values,
        aims={
            "speedup_redundant": report.Aim(value=values["speedup_redundant"], aim=AIM).to_json(),
            "planner_error": report.Aim(value=values["planner_error"], aim=ERROR, at_least=False).to_json(),
        },
        data={"rows": [to_json(row) for row in rows], "costs": dataclasses.asdict(costs)},
        figure=False,
        beside="one paced engine, its actor and the environments' processes, the learner on a core of its own",
    )


def of(rows: list[Row], setup: Setup, deviation_s: float) -> Row:
    """One of them."""
    return next(r for r in rows if (r.name, r.deviation_s) == (setup.name, deviation_s))


def values_of(rows: list[Row]) -> dict[str, float]:
    """The speed-ups at the largest deviation, measured and predicted; the planner's largest error over all rows."""
    most = max(row.deviation_s for row in rows)
    batch = of(rows, BATCH, most)
    values: dict[str, float] = {}
    for key, setup in (("speedup_by_rounds", ALONE), ("speedup", WINDOW), ("speedup_redundant", REDUNDANT)):
        row = of(rows, setup, most)
        values[key] = batch.mean_s / row.mean_s
        values[f"{key}_predicted"] = batch.predicted_s / row.predicted_s
    values["planner_error"] = max(abs(row.predicted_s / row.mean_s - 1) for row in rows)
    values["deviation"] = most * SPEED
    return values


def table_of(rows: list[Row]) -> report.Table:
    """A line for each schedule at each deviation."""
    lines = []
    for row in rows:
        batch = of(rows, BATCH, row.deviation_s)
        mean, std = report.mean_std(row.updates_s)
        lines.append(
            [
                f"{row.deviation_s * SPEED:g}",
                row.name,
                f"{mean:.2f} ± {std:.2f}",
                f"{row.predicted_s:.2f}",
                f"{row.predicted_s / row.mean_s - 1:+.0%}",
                f"{batch.mean_s / row.mean_s:.2f}",
                f"{batch.predicted_s / row.predicted_s:.2f}",
                str(row.max_lag),
            ]
        )
    columns = ["deviation", "schedule", "an update, s", "predicted, s", "off", "speed-up", "predicted", "largest lag"]
    return report.Table(columns=columns, rows=lines)


def about(costs: Costs) -> list[str]:
    """What was run, as paragraphs."""
    return [
        f"`python -m tests.bench.agentic`: episodes of {NUM_TURNS} turns, {U} groups of {K} an update. At each step "
        f"an environment takes a time drawn from a normal distribution of mean {MEAN_S * SPEED:g} and the deviation of "
        f"the line, what is below 0 left out; time is scaled 1:{SPEED:g}. It sleeps that time in a process of its own. "
        f"The engine is paced: {TURN_TOKENS} tokens a turn at {TOKENS_PER_S:g} a second each, "
        f"{TURN_TOKENS / TOKENS_PER_S * SPEED:g} of the latency's unit. Actor, learner, store and environments' "
        "processes are the real ones.",
        f"All have {U * K} environments at once, but for the redundant ones, which have "
        f"{REDUNDANT.num_environments} (eta {ETA:g} for prompts and for samples). Windows have alpha = {ALPHA:g}.",
        f"In the calibration an episode took {1000 * costs.start_s:.1f} ms of the machine to start and "
        f"{1000 * costs.turn_s:.1f} ms a turn, which was {1000 * costs.delay_s:.1f} ms late besides; the planner is "
        "told that, the distribution, and what training and publishing cost there.",
    ]


def remarks_of(values: dict[str, float]) -> list[str]:
    """What the numbers mean, as paragraphs."""
    return [
        "Group size and batch are from the published system's examples, since the text of the paper that we have gives "
        "none; turns and the engine's rate are ours (`tests/bench/agentic/setups.py`). The aim is ROLL Flash's "
        "speed-up on agentic tasks, which are others. Speed-ups in the line below are of the largest deviation, "
        f"{values['deviation']:g}.",
        f"The planner's updates are at most {values['planner_error']:.0%} off.",
    ]


if __name__ == "__main__":
    app.run(main)
