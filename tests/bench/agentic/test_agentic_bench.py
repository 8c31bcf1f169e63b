"""The parts of the bench of episodes that are not the system's own, and the bench itself at a fraction of its size."""

import asyncio
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from actor.environments.protocol import Step
from bridge.rollout_types import Sampling, Version
from launch.tools.plan.sim.episodes import draw_latencies_s
from launch.tools.plan.sim.simulate import simulate
from tests.actor.environments.chat import rendering
from tests.actor.fakes import until
from tests.bench.agentic.__main__ import values_of
from tests.bench.agentic.measure import Costs, Row, _solve, profile_of, updates_s
from tests.bench.agentic.setups import (
    ALONE,
    BATCH,
    DEVIATIONS_S,
    NUM_TURNS,
    REDUNDANT,
    SETUPS,
    WINDOW,
    K,
    U,
    engine_profile,
)
from tests.bench.agentic.sleeping import NAME, Sleeping
from tests.bench.rig.episodes import EpisodeEngine, LockStep
from tests.bench.rig.paced_engine import PacedEngine
from tests.bench.rig.rig import Result
from tests.bench.rig.session import Session
from tests.bench.rig.work import Work

PROMPT = np.array([1, 2, 3], np.int32)


def work(**fields) -> Work:
    given: dict[str, Any] = dict(environment=NAME, num_turns=3, turn_tokens=4, mean_s=0.0, deviation_s=0.0)
    return Work(**(given | fields))


def test_latencies_of_the_rig_are_distributed_as_the_planner_draws_them():
    mine = [
        x
        for n in range(400)
        for x in work(num_turns=5, mean_s=0.1, deviation_s=0.1).latencies_s(np.array([n], np.int32), 1)
    ]
    theirs = draw_latencies_s(profile_of(BATCH, 0.1, costs()).episodes.step_s, 2000, key=(1,))  # pyright: ignore
    assert min(mine) >= 0
    for p in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(mine, p) == pytest.approx(np.quantile(theirs, p), abs=0.02)
    assert statistics.fmean(mine) == pytest.approx(0.1288, abs=0.005)  # a normal of 0.1 and 0.1 without its negatives


def test_latencies_are_the_episodes_own_whatever_schedule_asks():
    drawn = work(mean_s=0.1, deviation_s=0.05)
    assert drawn.latencies_s(PROMPT, 2) == drawn.latencies_s(PROMPT, 2) != drawn.latencies_s(PROMPT, 3)
    assert work(mean_s=0.1).latencies_s(PROMPT, 2) == [0.1] * 3


def test_sleeping_environment_is_done_after_its_last_latency():
    async def play() -> list[Step]:
        environment = Sleeping()
        assert environment.reset({"latencies_s": [0.0, 0.0]}) == []
        return [await environment.step("x") for _ in range(2)]

    assert [s.done for s in asyncio.run(play())] == [False, True]


def test_lock_step_goes_on_when_all_that_have_not_left_are_there():
    async def run() -> list[str]:
        lock, seen = LockStep(3), []

        async def episode(name: str, num_turns: int) -> None:
            for turn in range(num_turns):
                await lock.meet()
                seen.append(f"{turn}{name}")
            lock.leave()

        for _ in range(2):  # one batch, then another
            async with asyncio.TaskGroup() as batch:
                for name, num in (("a", 3), ("b", 1), ("c", 2)):
                    batch.create_task(episode(name, num))
        return seen

    seen = asyncio.run(run())
    assert [s[0] for s in seen] == ["0", "0", "0", "1", "1", "2"] * 2


def played(lock_step: int, num: int, **fields):
    """So many episodes at once, in real processes; what the engine was asked, with what was in it then."""
    log: list[tuple[str, int]] = []

    async def run():
        paced = PacedEngine(engine_profile(), version=Version(incarnation=0, step=0))
        ask = paced.sample

        async def sample(prompt_tokens, sampling, *, request_id, priority):
            log.append((request_id, prompt_tokens.size))
            return await ask(prompt_tokens, sampling, request_id=request_id, priority=priority)

        paced.sample = sample
        engine = EpisodeEngine(paced, work(lock_step=lock_step, **fields), rendering(""), max_context_tokens=1000)
        await engine.load()
        try:
            return await asyncio.gather(
                *(
                    engine.sample(PROMPT, Sampling(max_tokens=100), request_id=f"000000000.{i}", priority=0)
                    for i in range(num)
                )
            )
        finally:
            await engine.close()

    return asyncio.run(run()), log


def test_episode_on_the_rig_is_turns_of_the_given_length_with_observations_between():
    (sample,), log = played(0, 1)
    assert sample.episode is not None and sample.finish == "stop" and sample.num_sampled == 12
    assert sample.episode.sampled.tolist() == [True] * 4 + [False] + [True] * 4 + [False] + [True] * 4
    assert [size for _, size in log] == [3, 8, 13]


def test_batch_in_lock_step_asks_for_a_turn_of_all_before_the_next_of_any():
    samples, log = played(4, 4, mean_s=0.01, deviation_s=0.02)
    assert len(samples) == 4
    assert [size for _, size in log] == [3] * 4 + [8] * 4 + [13] * 4


def test_episode_that_lost_its_race_leaves_no_process():
    async def run() -> None:
        paced = PacedEngine(engine_profile(), version=Version(incarnation=0, step=0))
        engine = EpisodeEngine(paced, work(mean_s=1000.0), rendering(""), max_context_tokens=1000)
        await engine.load()
        try:
            asking = asyncio.create_task(
                engine.sample(PROMPT, Sampling(max_tokens=100), request_id="000000000.0", priority=0)
            )
            await until(lambda: engine.pool.num_running == 1, "the episode")
            asking.cancel()
            await until(lambda: engine.pool.num_running == 0, "its end")
            assert not engine.pool.failures
        finally:
            await engine.close()

    asyncio.run(run())


def costs() -> Costs:
    from launch.tools.plan.profile import LearnerProfile, PublishProfile

    return Costs(
        learner=LearnerProfile(seconds_per_token=1e-5),
        publish=PublishProfile(),
        prompt_tokens=11,
        observation_tokens=1,
        start_s=0.002,
        turn_s=0.0005,
    )


def test_setups_have_as_many_environments_as_a_batch_has_episodes_but_for_the_redundant():
    for setup in SETUPS:
        config = setup.config(4)
        assert config.rounds.groups_per_update * config.rounds.samples_per_group == U * K
        if config.admission.policy == "window":
            assert config.sequences == setup.num_environments
    assert {s.num_environments for s in (BATCH, ALONE, WINDOW)} == {U * K} and REDUNDANT.num_environments == 10 * 10


def test_planner_alone_says_that_each_schedule_is_faster_than_the_one_before():
    seconds = [
        simulate(s.config(8), profile_of(s, DEVIATIONS_S[-1], costs()), num_updates=12, warmup_updates=4).step_s
        for s in SETUPS
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_solve_finds_where_a_function_says_what_is_wanted():
    assert _solve(lambda t: 3.0 + 100 * t, 3.25) == pytest.approx(0.0025, abs=1e-5)
    assert _solve(lambda t: 3.0 + 100 * t, 1.0) < 1e-5  # less than nothing is nothing


def test_turn_that_is_late_holds_up_nobody_else():
    none = dataclasses.replace(costs(), turn_s=0.0)
    late, busy = dataclasses.replace(none, delay_s=0.002), dataclasses.replace(none, turn_s=0.002)
    step_s = [
        simulate(BATCH.config(8), profile_of(BATCH, 0.0, c), num_updates=8, warmup_updates=2).step_s
        for c in (none, late, busy)
    ]
    assert step_s[1] - step_s[0] == pytest.approx(NUM_TURNS * 0.002, abs=1e-3)
    assert step_s[2] - step_s[0] == pytest.approx(U * K * NUM_TURNS * 0.002, abs=1e-2)


def test_session_of_episodes_travels():
    session = BATCH.session(2, 0.05)
    assert Session.from_json(json.loads(json.dumps(session.to_json()))) == session


def test_updates_are_from_step_to_step():
    events = [{"name": "apply", "ts": at * 1e6, "dur": 0.5e6} for at in (3.0, 1.0, 7.0)]
    fields = dict(rounds=[], steps=[], evals=[], num_passes=0, num_micro_batches=0, real_tokens=0)
    result = Result(**fields, step_cpu_s=[], dropped={}, running=[], events=events)  # pyright: ignore[reportArgumentType]
    assert updates_s(result) == [2.0, 4.0]


def test_values_are_of_the_largest_deviation_and_the_error_of_all():
    rows = [
        Row(name=s.name, deviation_s=d, updates_s=[t], predicted_s=t * off, max_lag=0)
        for d, off in ((0.01, 1.1), (0.1, 1.0))
        for s, t in zip(SETUPS, (6.0, 4.0, 3.0, 2.0), strict=True)
    ]
    values = values_of(rows)
    assert (values["speedup_by_rounds"], values["speedup"], values["speedup_redundant"]) == (1.5, 2.0, 3.0)
    assert values["planner_error"] == pytest.approx(0.1) and values["deviation"] == pytest.approx(10)


@pytest.mark.nightly
def test_bench_small_ends_with_its_line(tmp_path: pathlib.Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.agentic", "--small", f"--results_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["bench"] == "agentic" and line["aims"].keys() == {"speedup_redundant", "planner_error"}
    assert {"speedup", "speedup_redundant", "planner_error"} <= line["values"].keys()
    assert (tmp_path / "agentic.md").exists() and (tmp_path / "agentic.json").exists()
