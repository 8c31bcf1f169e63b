"""RollPacker's stream trainer on two cores: one engine gives its core up to training before the round is over.

    python -m tests.bench.stream_trainer [--small]

Two "GPUs", as in the paper's colocated system (section 4.4): core 0 has engine A and the learner, core 1 has engine B
and the gradient helper. Real vLLM, real processes and locks; the training cost is real gradient passes. All rounds are
long ones: no race, lengths of `tests.bench.tail` at 32x. Without scaling, both cores train when the rollout is over.
With scaling, engine B hands its requests over to A at a fraction of complete groups and its core trains; the learner
joins at the rollout's end. A trained token costs so much that training takes 22/93 of a round without scaling (Table 1,
without its reward).

Aims are the paper's (Table 3), written down before any run: adaptive scaling 1.08 times as fast as none, and as fast as
each fixed fraction within the error. `gradient_difference` is the largest difference of a gradient summed by two
processes from that of one, relative to its tensor's largest entry (`tests/learner/gradient_helper/two_processes.py`).
`predicted` is the planner's ratio for these lengths, told the measured seconds until the helper computes, until its
sums are merged and until the engine serves again.

What it cannot show: memory that sleeps and wakes, since a CPU's vLLM keeps its own, and an engine that slows as it
fills: here a step with 64 sequences takes 1.7 times one with a single sequence, which favours giving an engine up.
"""

import dataclasses
import pathlib
import statistics
import tempfile
from typing import Any

from absl import app

from configs.schema import Config
from configs.sections import HelpersConfig, PackingConfig, RoundsConfig
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.profile import HelperProfile
from launch.tools.plan.sim.simulate import simulate
from tests.bench.harness import result, sessions
from tests.bench.harness.estimates import ratio
from tests.bench.planner.measure import measure_profile
from tests.bench.rig.calibrate import calibrate
from tests.bench.rig.rig import Result
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config
from tests.bench.tail import MAX_RESPONSE, lengths_of
from tests.learner.gradient_helper.two_processes import gradient_difference

R, K = 16, 4
LENGTHS = lengths_of(32)
NONE, ADAPTIVE = "no scaling", "adaptive"
RELEASE_AT = {NONE: 1.0, "20%": 0.2, "30%": 0.3, "40%": 0.4, ADAPTIVE: 0.0}
NUM_SKIPPED = 4
"""First rounds of a session: the helper's process starts, and adaptive scaling tries its first round of a kind."""
TRAINING_SHARE = 22 / 93
ALONE = TRAINING_SHARE * 2 / (1 + TRAINING_SHARE)
"""Share of a round in which one core trains what two train in `TRAINING_SHARE`."""
COLUMNS = {
    "engine B stops at": "{name}",
    "seconds a round": "{seconds_per_round:.2f}",
    "times as fast": "{speedup:.2f}",
    "predicted": "{predicted}",
    "complete groups": "{released_at:.2f}",
    "until it trains, s": "{start_s:.2f}",
    "merging, s": "{hand_over_s:.2f}",
    "micro-batches of the helper": "{batches:.1f}",
}


def config_of(release_at: float | None, num_rounds: int) -> Config:
    """Rounds of one update; None is one core that trains alone when the round is complete."""
    config = make_config(
        "stream_trainer",
        num_updates=num_rounds,
        rounds=RoundsConfig(
            groups_per_round=R,
            samples_per_group=K,
            groups_per_update=R,
            train_start="round_complete" if release_at is None else "group_ready",
        ),
        max_response_tokens=MAX_RESPONSE,
        max_num_seqs=R * K,
        packing=PackingConfig(rows=1, row_tokens=512),
    )
    helpers = HelpersConfig() if release_at is None else HelpersConfig(num_engines=1, release_at=release_at)
    actor = dataclasses.replace(config.actor, colocated=True, num_engines=2, cpu_cores="0;1")
    return dataclasses.replace(config, actor=actor, helpers=helpers)


def session_of(release_at: float | None, num_rounds: int) -> Session:
    return Session(config=config_of(release_at, num_rounds), lengths=LENGTHS, num_engines=2)


def row_of(name: str, results: list[Result]) -> dict[str, Any]:
    """Returns what the rounds after the first ones came to."""
    rounds = [row for one in results for row in one.rounds]

    def of(metric: str) -> float:
        return statistics.fmean(row[metric] for row in rounds)

    return {
        "name": name,
        "seconds": [statistics.fmean(row["round/rollout_to_train_end_s"] for row in one.rounds) for one in results],
        "seconds_per_round": of("round/rollout_to_train_end_s"),
        "released_at": of("helper/released_at"),
        "start_s": of("helper/start_s"),
        "hand_over_s": of("helper/hand_over_s"),
        "batches": of("helper/batches"),
        "lost": sum(row["helper/lost"] for row in rounds),
        "machine_speed": [one.machine_speed for one in results],
    }


def predict(profile: dict[str, Any], adaptive: dict[str, Any], num_rounds: int) -> float:
    """Returns the planner's ratio of a round without scaling to one with it, told what giving the engine up costs."""
    costs = HelperProfile(start_s=adaptive["start_s"], hand_over_s=adaptive["hand_over_s"])
    on_both_cores = dataclasses.replace(
        plan_profile.from_dict(profile), num_engines=2, num_learner_chips=0, helpers=costs
    )
    none = simulate(config_of(None, num_rounds), on_both_cores, num_updates=num_rounds)
    scaled = simulate(config_of(0.0, num_rounds), on_both_cores, num_updates=num_rounds)
    return none.step_s / scaled.step_s


def main(argv: list[str]) -> None:
    """Runs all, writes the results, prints the JSON line."""
    del argv
    num_rounds, turns = (6, 1) if result.SMALL.value else (12, sessions.TURNS)
    with sessions.open_rig(config_of(None, 1), num_engines=2, learner_core=0) as rig:
        rig.run(session_of(None, 1))  # compiles, warms up
        calibration = calibrate(
            rig, {"alone": session_of(None, 4)}, bounds=(1 - ALONE - 0.02, 1 - ALONE + 0.02), tries=3
        )
        cases = {name: session_of(release_at, num_rounds) for name, release_at in RELEASE_AT.items()}
        found = sessions.run_in_turns(rig, cases, turns=turns, passes_per_token=calibration.passes_per_token)
        profile = measure_profile(
            rig,
            config_of(None, num_rounds),
            results=list(calibration.results.values()),
            lengths=LENGTHS,
            num_groups=num_rounds * R,
        )
    rows = {name: row_of(name, [one.skip(NUM_SKIPPED) for one in of_case]) for name, of_case in found.items()}
    values: dict[str, Any] = {}
    for name, row in rows.items():
        speedup = ratio(rows[NONE]["seconds"], row["seconds"])
        row |= {"speedup": speedup.value, "predicted": ""}
        if name != NONE:
            values[f"speedup_{name.rstrip('%')}"] = speedup
    best = max((name for name in rows if name.endswith("%")), key=lambda name: rows[name]["speedup"])
    values["adaptive_over_best_fixed"] = ratio(rows[best]["seconds"], rows[ADAPTIVE]["seconds"])
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        values["gradient_difference"] = gradient_difference(pathlib.Path(folder))
    predicted = predict(profile, rows[ADAPTIVE], num_rounds)
    values["predicted_speedup"] = predicted
    rows[ADAPTIVE]["predicted"] = f"{predicted:.2f}"
    values["batches_of_helper_without_scaling"] = rows[NONE]["batches"]
    values["lost"] = sum(row["lost"] for row in rows.values())
    values["start_s"] = rows[ADAPTIVE]["start_s"]
    result.finish(
        "stream_trainer",
        __doc__,
        values=values | calibration.values(),
        aims={
            "speedup_adaptive": result.at_least(1.08, "RollPacker, Table 3"),
            "adaptive_over_best_fixed": result.at_least(1.0, "RollPacker, Table 3"),
            "gradient_difference": result.at_most(1e-6, "ours"),
            "lost": result.at_most(0, "ours"),
        },
        rows=list(rows.values()),
        columns=COLUMNS,
        notes=calibration.notes(),
        profile=profile,
    )


if __name__ == "__main__":
    app.run(main)
