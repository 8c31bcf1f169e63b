"""Runs a schedule of episodes, and has the planner predict it from what was known before."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.store.sqlite_database import LOOK_S
from launch.tools.plan.profile import LearnerProfile, Profile, PublishProfile
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import EpisodeProfile, LatencyProfile, LengthProfile
from tests.bench.agentic.setups import (
    MEAN_S,
    NUM_TURNS,
    SPEED,
    TOKENS_PER_S,
    TURN_TOKENS,
    Setup,
    engine_profile,
)
from tests.bench.planner.measure import learner_costs, publish_costs
from tests.bench.rig.rig import Result, Rig

MAX_TURN_S = 0.01
"""More of the machine than any turn takes."""
NUM_CALIBRATED = 5
"""Updates of a calibration session."""
NUM_BUSY = 17
"""Updates of the one whose environments answer at once; it is over sooner."""
CALIBRATED_S = 0.03
"""The deviation of the calibration: none that is measured, and enough that not all episodes step at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What the planner is told beside the profile that was chosen."""

    learner: LearnerProfile
    publish: PublishProfile
    prompt_tokens: int
    observation_tokens: int
    start_s: float
    turn_s: float = 0.0
    """What a turn takes of the machine: others' turns wait for it."""
    delay_s: float = 0.0
    """What a turn is late besides, which holds up nobody else: timers, processes that are woken."""


def updates_s(result: Result) -> list[float]:
    """From the end of each optimizer step to the next one's."""
    ends = sorted((e["ts"] + e["dur"]) / 1e6 for e in result.events if e["name"] == "apply")
    return [float(x) for x in np.diff(ends)]


def calibrate(rig: Rig, setup: Setup) -> Costs:
    """What episodes by rounds cost beside what was drawn, at a deviation that is not measured.

    Episodes of one turn and of all tell what starting one takes. Environments that answer at once leave the machine no
    rest: a turn's time of it is what makes the planner say what was measured of them. Then what a turn is late besides
    is what the calibration's environments still lack.
    """
    few, many = (rig.run(setup.session(NUM_CALIBRATED, CALIBRATED_S, num_turns=n)) for n in (1, NUM_TURNS))
    busy = rig.run(setup.session(NUM_BUSY, 0.0, mean_s=0.0))
    config = setup.config(NUM_CALIBRATED)
    prompts = [np.asarray(p, np.int32) for p in rig.prompts(config, NUM_CALIBRATED * setup.groups)]
    over_few, over_many = (_beyond_drawn_s(result, setup, prompts, n) for result, n in ((few, 1), (many, NUM_TURNS)))
    num_observed = many.response_tokens - NUM_TURNS * TURN_TOKENS
    costs = Costs(
        learner=LearnerProfile(**learner_costs([many])),
        publish=PublishProfile(**publish_costs([many])),
        prompt_tokens=round(statistics.fmean(p.size for p in prompts)),
        observation_tokens=round(num_observed / (NUM_TURNS - 1)),
        # All of a batch start at once, one after the other: on average half of them come before.
        start_s=max(0.0, over_few - (over_many - over_few) / (NUM_TURNS - 1)) * 2 / (setup.groups * setup.samples + 1),
    )
    wanted_s = statistics.median(updates_s(busy))
    turn_s = _solve(
        lambda t: _calibrated_s(setup, dataclasses.replace(costs, turn_s=t), mean_s=0.0, deviation_s=0.0), wanted_s
    )
    costs = dataclasses.replace(costs, turn_s=turn_s)
    late_s = statistics.median(updates_s(many)) - _calibrated_s(setup, costs, mean_s=MEAN_S, deviation_s=CALIBRATED_S)
    return dataclasses.replace(costs, delay_s=max(0.0, late_s / NUM_TURNS))


def _calibrated_s(setup: Setup, costs: Costs, *, mean_s: float, deviation_s: float) -> float:
    """An update of the calibration, as the planner has it."""
    profile = profile_of(setup, deviation_s, costs, mean_s=mean_s)
    return simulate(setup.config(NUM_CALIBRATED), profile, num_updates=32, warmup_updates=1, seed=2).step_s


def _solve(says: Callable[[float], float], wanted: float) -> float:
    """The argument, 0 or more, at which an increasing function says what is wanted."""
    low, high = 0.0, MAX_TURN_S
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if says(middle) < wanted else (low, middle)
    return (low + high) / 2


def _beyond_drawn_s(result: Result, setup: Setup, prompts: list[np.ndarray], num_turns: int) -> float:
    """Mean time of an episode beside its latencies and its tokens; the first round finds everything cold."""
    work = setup.session(NUM_CALIBRATED, CALIBRATED_S, num_turns=num_turns).episodes
    assert work is not None
    spans = [e for e in result.events if e["name"] == "rollout" and e["args"]["round"] > 0]
    took = statistics.fmean(e["dur"] / 1e6 for e in spans)
    drawn = statistics.fmean(
        sum(work.latencies_s(prompts[order], index))
        for order in {e["args"]["order"] for e in spans}
        for index in range(setup.samples)
    )
    return took - drawn - num_turns * TURN_TOKENS / TOKENS_PER_S


def profile_of(setup: Setup, deviation_s: float, costs: Costs, *, mean_s: float = MEAN_S) -> Profile:
    """The planner's input: what was chosen, and what the calibration cost."""
    return Profile(
        engine=engine_profile(),
        response_tokens=_all(TURN_TOKENS),
        prompt_tokens=_all(costs.prompt_tokens),
        learner=costs.learner,
        publish=costs.publish,
        claim_s=LOOK_S / 2,
        episodes=EpisodeProfile(
            num_turns=_all(NUM_TURNS),
            step_s=LatencyProfile(mean_s=mean_s + costs.delay_s, deviation_s=deviation_s),
            observation_tokens=costs.observation_tokens,
            start_s=costs.start_s,
            turn_s=costs.turn_s,
            in_lock_step=setup.in_lock_step,
        ),
    )


def run(rig: Rig, setup: Setup, deviation_s: float, costs: Costs, *, num_updates: int) -> dict[str, Any]:
    """A schedule; the updates of its first round, or of a window's (1 + alpha), are left out."""
    warmup = 4 if setup.by_window else 1
    result = rig.run(setup.session(warmup + num_updates, deviation_s))
    config = setup.config(warmup + num_updates)
    outcome = simulate(
        config, profile_of(setup, deviation_s, costs), num_updates=4 * num_updates, warmup_updates=warmup, seed=1
    )
    return {
        "name": setup.name,
        "deviation": deviation_s * SPEED,
        "updates_s": updates_s(result)[warmup - 1 :],
        "predicted_s": outcome.step_s,
        "max_lag": result.max_lag,
        "num_deferred": round(result.rounds[-1]["round/long_queue"]),
    }


def _all(tokens: int) -> LengthProfile:
    return LengthProfile(kind="uniform", min_tokens=tokens, max_tokens=tokens)
