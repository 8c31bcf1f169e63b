"""Sessions one after the other on one real engine and one learner."""

import os
from typing import Any

import numpy as np
import pytest

from configs.sections import AdmissionConfig, PackingConfig, PublishConfig, RoundsConfig
from tests.bench.planner.measure import measure_profile
from tests.bench.rig.lengths import Lengths
from tests.bench.rig.rig import Rig
from tests.bench.rig.session import Session
from tests.bench.rig.setting import make_config, tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]  # it shows benches, not the product
LENGTHS = Lengths(kind="uniform", max_tokens=24)
ROUNDS = RoundsConfig(groups_per_round=4, samples_per_group=4, groups_per_update=2)
SIZE: dict[str, Any] = dict(max_response_tokens=24, max_num_seqs=8, packing=PackingConfig(rows=1, row_tokens=64))


def by_round(num_updates=4):
    return make_config("cgp", num_updates=num_updates, rounds=ROUNDS, **SIZE)


def in_flight():
    return make_config(
        "pipelinerl",
        num_updates=3,
        rounds=ROUNDS,
        admission=AdmissionConfig(policy="window", width=4),
        publish=PublishConfig(when="every", kv_cache="recompute"),
        **SIZE,
    )


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # it binds engine and learner itself
    with Rig(tmp_path_factory.mktemp("rig"), by_round(), tiny_model()) as one:
        yield one


def test_sessions_replay_the_same_work_whatever_the_schedule_and_the_pace(rig):
    prompts = [np.asarray(p, np.int32) for p in rig.prompts(by_round(), 8)]
    want = sum(p.size + LENGTHS.tokens(p, i) for p in prompts for i in range(4))
    first = rig.run(Session(config=by_round(), lengths=LENGTHS))
    assert first.real_tokens == want and len(first.rounds) == 2 and first.num_samples == 32
    assert first.num_passes == first.num_micro_batches
    paced = rig.run(Session(config=by_round(), lengths=LENGTHS, passes_per_token=0.1))
    assert paced.real_tokens == want
    assert abs(paced.num_passes - 0.1 * want) <= paced.num_micro_batches
    assert paced.steps[-1]["num_compilations"] == first.steps[-1]["num_compilations"] == 2  # compiled once for both
    assert first.evals == []


def worst_at_lag_0(result):
    """Over the updates that have tokens of their own weights."""
    known = [row["max_abs_dlogprob_lag0"] for row in result.steps if row["max_abs_dlogprob_lag0"] is not None]
    return max(known)


def test_sessions_serve_their_own_weights_in_every_mode(rig):
    # By window tickets take any weights; those of the session before must not answer for this one's.
    result = rig.run(Session(config=in_flight(), lengths=LENGTHS))
    assert [row["step"] for row in result.steps] == [1, 2, 3] and result.dropped == {}
    assert worst_at_lag_0(result) < 1e-4  # engine against learner
    again = rig.run(Session(config=by_round(2), lengths=LENGTHS))
    assert worst_at_lag_0(again) < 1e-4


def test_rewards_may_be_the_tasks_own(rig):
    result = rig.run(Session(config=by_round(2), rewards="task"))
    assert all(0 <= row["reward/min"] <= row["reward/max"] <= 1 for row in result.steps)


def test_profile_lists_the_lengths_that_were_replayed(rig):
    result = rig.run(Session(config=by_round(2), lengths=LENGTHS))
    profile = measure_profile(rig, by_round(), results=[result], lengths=LENGTHS, num_groups=4)
    want = sum(map(sum, profile["response_tokens"]["groups"])) / 16
    np.testing.assert_allclose(result.response_tokens, want)
    assert profile["engine"]["running"] == [1, 2, 4, 8]
    assert profile["learner"]["seconds_per_token"] > 0 and profile["publish"]["pause_s"] > 0
