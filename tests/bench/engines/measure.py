"""Runs a schedule on the fleet, and has the planner predict it from what was known before."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.tools.plan.profile import LearnerProfile, Profile, PublishProfile
from launch.tools.plan.sim.sim_engine import NEVER, SimEngine
from launch.tools.plan.sim.simulate import simulate
from launch.tools.plan.workload import LengthProfile
from tests.bench.engines.batch_rollout import deal
from tests.bench.engines.fleet_process import STORE_LOOK_S
from tests.bench.engines.oracle import Work, batches_s, trainings_s
from tests.bench.engines.setups import NUM_ENGINES, TRAINED, Setup, engine_profile
from tests.bench.rig.replay import HashRewards
from tests.bench.rig.rig import Result, Rig

SPARE = 8
"""Prompts asked for, over those of the rounds: filtering takes more, and so do races."""


def rollout_s(result: Result) -> list[float]:
    """Of each round of one update, from its first ticket to the last group that it trains.

    That was there when the last micro-batch began. What ended later had lost a race.
    """
    seconds = []
    for step in range(len(result.steps)):
        issued = min(e["ts"] for e in result.events if e["name"] == "issue" and e["args"]["step"] == step)
        trained = max(e["ts"] for e in result.events if e["name"] == "train" and e["args"]["step"] == step)
        ends = [e["ts"] + e["dur"] for e in _judged(result) if e["args"]["round"] == step]
        seconds.append((max(end for end in ends if end <= trained) - issued) / 1e6)
    return seconds


def tickets_of(result: Result) -> tuple[int, int]:
    """The fewest and the most that one engine answered."""
    counts = {e["pid"]: 0 for e in result.events if str(e["args"].get("name", "")).startswith("actor-")}
    for event in _judged(result):
        counts[event["pid"]] += 1
    return min(counts.values(), default=0), max(counts.values(), default=0)


def _judged(result: Result) -> list[dict[str, Any]]:
    return [e for e in result.events if e["name"] == "reward" and e["args"]["kind"] == "train"]


def profile_of(setup: Setup, problems: Sequence[tuple[list[int], str]], **fields: Any) -> Profile:
    """The planner's input: the engines' and the lengths, which are both chosen, and what training costs."""
    lengths = _lengths(setup, problems)
    return Profile(
        engine=engine_profile(),
        response_tokens=LengthProfile(kind="groups", groups=tuple(lengths)),
        prompt_tokens=LengthProfile(kind="groups", groups=tuple((len(tokens),) for tokens, _ in problems)),
        num_engines=NUM_ENGINES,
        claim_s=STORE_LOOK_S / 2,
        zero_variance_groups=setup.flat_share,
        **{"learner": LearnerProfile(seconds_per_token=1e-9), "publish": PublishProfile(), **fields},
    )


def predict_rounds_s(setup: Setup, profile: Profile, num_rounds: int) -> float:
    """A round's mean, from its first ticket to its last update."""
    config = setup.config(num_rounds)
    outcome = simulate(config, profile, num_updates=config.run.num_updates)
    return outcome.round_mean("rollout_to_train_end_s")


def predict_batches_s(setup: Setup, problems: Sequence[tuple[list[int], str]], num_rounds: int) -> float:
    """A round's mean in the batch rollout, on the planner's simulated engines."""
    rewards = HashRewards(setup.flat_share)
    numbers = iter(range(len(problems)))
    config = setup.config(1)
    seconds = []
    for _ in range(num_rounds):
        num_missing, round_s = config.rounds.groups_per_round, 0.0
        while num_missing:
            batch = [next(numbers) for _ in range(num_missing)]
            round_s += _batch_s(setup, [problems[n][0] for n in batch], config.rounds.samples_per_group)
            num_missing = sum(rewards.is_flat(problems[n][1]) for n in batch)
        seconds.append(round_s)
    return statistics.fmean(seconds)


def work_of(setup: Setup, problems: Sequence[tuple[list[int], str]]) -> Work:
    """The oracle's input: the lengths, which groups are filtered out, and the engines."""
    rounds, rewards = setup.config(1).rounds, HashRewards(setup.flat_share)
    return Work(
        lengths=_lengths(setup, problems),
        is_flat=[rewards.is_flat(answer) for _, answer in problems],
        num_groups=rounds.groups_per_round,
        num_samples=rounds.samples_per_group,
        by_sample=setup.unit == "sample",
        profile=engine_profile(),
        num_engines=NUM_ENGINES,
        prompt_tokens=[len(tokens) for tokens, _ in problems],
    )


def _lengths(setup: Setup, problems: Sequence[tuple[list[int], str]]) -> list[tuple[int, ...]]:
    requests = setup.config(1).rounds.requests_per_group
    return [
        tuple(setup.lengths.tokens(np.asarray(tokens, np.int32), i) for i in range(requests)) for tokens, _ in problems
    ]


def _batch_s(setup: Setup, prompts: Sequence[list[int]], num_samples: int) -> float:
    engines = [SimEngine(engine_profile()) for _ in range(NUM_ENGINES)]
    for number, engine in enumerate(deal(len(prompts), NUM_ENGINES)):
        for index in range(num_samples):
            engines[engine].add(
                0.0,
                f"{number}.{index}",
                priority=number,
                prompt_tokens=len(prompts[number]),
                response_tokens=setup.lengths.tokens(np.asarray(prompts[number], np.int32), index),
            )
    last_s = 0.0
    for engine in engines:
        while (at_s := engine.next_event_s()) < NEVER:
            if engine.advance(at_s):
                last_s = max(last_s, at_s)
    return last_s


def problems_of(rig: Rig, setup: Setup, num_rounds: int) -> list[tuple[list[int], str]]:
    """The prompts that so many rounds may take, in the order of their tickets."""
    config = setup.config(num_rounds)
    share = 1 - setup.flat_share
    return rig.problems(config, int(num_rounds * config.rounds.groups_issued / share * 1.5) + SPARE)


def run_batches(rig: Rig, setup: Setup, num_rounds: int) -> dict[str, Any]:
    """The batch rollout."""
    problems = problems_of(rig, setup, num_rounds)
    answer = rig.ask_actor("roll_out", session=setup.session(num_rounds).to_json(), problems=problems)
    return {
        "name": setup.name,
        "rounds_s": answer["rounds_s"],
        "predicted_s": predict_batches_s(setup, problems, num_rounds),
        "ideal_s": statistics.fmean(batches_s(work_of(setup, problems), num_rounds=num_rounds)),
    }


def run_rollouts(rig: Rig, setup: Setup, num_rounds: int) -> dict[str, Any]:
    """A schedule of ours, by what its rollouts take; the first round, in which the learner compiles, is left out."""
    ran = rig.run(setup.session(1 + num_rounds))
    problems = problems_of(rig, setup, 1 + num_rounds)
    predicted_s = predict_rounds_s(setup, profile_of(setup, problems), num_rounds)
    return _row(setup, ran, rollout_s(ran)[1:], predicted_s, ideal_rollout_s(setup, problems, num_rounds))


def run_training(
    rig: Rig, setup: Setup, num_rounds: int, passes_per_token: float, learner: LearnerProfile, publish: PublishProfile
) -> dict[str, Any]:
    """A schedule of ours, by what its rounds take with their training; the oracle knows those of `TRAINED`."""
    ran = rig.run(setup.session(num_rounds, passes_per_token=passes_per_token))
    problems = problems_of(rig, setup, num_rounds)
    predicted_s = predict_rounds_s(setup, profile_of(setup, problems, learner=learner, publish=publish), num_rounds)
    rounds_s = [row["round/rollout_to_train_end_s"] for row in ran.rounds]
    is_known = setup.name in {other.name for other in TRAINED}
    ideal = ideal_s(setup, problems, num_rounds, learner=learner) if is_known else None
    return _row(setup, ran, rounds_s, predicted_s, ideal)


def ideal_rollout_s(setup: Setup, problems: Sequence[tuple[list[int], str]], num_rounds: int) -> float:
    """The mean rollout of `num_rounds` rounds after the first, by the oracle; nothing but tokens takes time."""
    rounds_s = trainings_s(
        work_of(setup, problems),
        num_started=setup.config(1).rounds.groups_issued,
        seconds_per_token=0.0,
        is_streamed=False,
        num_rounds=1 + num_rounds,
    )
    return statistics.fmean(rounds_s[1:])


def ideal_s(
    setup: Setup, problems: Sequence[tuple[list[int], str]], num_rounds: int, *, learner: LearnerProfile
) -> float:
    """A round's mean with its training, by the oracle; nothing but tokens takes time."""
    rounds = setup.config(1).rounds
    return statistics.fmean(
        trainings_s(
            work_of(setup, problems),
            num_started=rounds.groups_issued,
            seconds_per_token=learner.seconds_per_token,
            is_streamed=rounds.train_start == "group_ready",
            num_rounds=num_rounds,
        )
    )


def _row(setup: Setup, ran: Result, rounds_s: list[float], predicted_s: float, ideal: float | None) -> dict[str, Any]:
    """Seconds of each round measured, of the mean round predicted and ideal; `tickets` are of the least and the most
    busy engine, `late_s` is how late the fleet's process was (95th percentile)."""
    least, most = tickets_of(ran)
    return {
        "name": setup.name,
        "rounds_s": rounds_s,
        "predicted_s": predicted_s,
        "ideal_s": ideal,
        "samples": ran.num_samples,
        "max_lag": ran.max_lag,
        "tickets": f"{least} to {most}",
        "late_s": ran.late_s,
    }
