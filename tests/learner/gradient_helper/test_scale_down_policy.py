"""When engines give their devices up, told by heartbeats and times that are made up."""

import dataclasses

import numpy as np
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Version
from configs.presets import rolloutpipe
from configs.sections import HelpersConfig
from learner.gradient_helper.scale_down_policy import ScaleDownPolicy
from learner.metrics.round_times import WaitingRatios
from tests.bridge.factories import make_report
from tests.learner.streams import random_group

R = 20
NOW_S = 100.0


def policy_of(*, num_own=1, release_at=0.0, asleep=(), **reports):
    """Four engines, of which the last two help; `actor_0={"kv_tokens": 9}` sets fields of a report."""
    config = rolloutpipe.cgp("tiny")
    config = dataclasses.replace(
        config,
        rounds=dataclasses.replace(config.rounds, groups_per_round=R, groups_per_update=R),
        actor=dataclasses.replace(config.actor, num_engines=4),
        helpers=HelpersConfig(num_engines=2, release_at=release_at),
    )
    beats = [
        Heartbeat(
            process=name.replace("_", "-"),
            role="actor",
            pid=1,
            time_s=0.0,
            version=None if name in asleep else Version(incarnation=0, step=0),
            report=make_report(**{"num_running": 0, "num_engine_waiting": 0, "kv_usage": 0.0} | fields),
        )
        for name, fields in (reports or {"actor_0": {}}).items()
    ]
    return ScaleDownPolicy(
        config, num_own_devices=num_own, num_helper_devices=2, heartbeats=lambda: beats, clock=lambda: NOW_S
    )


def is_due(policy, num_arrived, *, start_s=0.0, train_s=None, is_long=False):
    times = WaitingRatios(rollout_start_s=start_s, train_start_s=train_s)
    return policy.is_due(num_arrived, times, is_long=is_long)


def end_round(policy, *, rollout_s=120.0, device_s=1.0):
    done = WaitingRatios(rollout_start_s=0.0, last_arrival_s=rollout_s, compute_s=device_s)
    policy.end_round(done, is_long=False, start_s=5.0, hand_over_s=2.0, helper_s=0.0)


def test_engines_are_asked_once_a_round_from_a_fifth_of_its_groups_on():
    policy = policy_of(num_own=0)
    for _ in range(2):
        assert [n for n in range(R + 1) if is_due(policy, n)] == [4]
        assert policy.released_at == 4 / R
        assert not is_due(policy, 0) and policy.released_at == 4 / R  # all are consumed, the round has not ended
        assert not policy.is_due_at_end(WaitingRatios(rollout_start_s=0.0), is_long=False)
        end_round(policy)
        assert policy.released_at == 0.0


def test_groups_that_arrive_together_pass_a_try_but_do_not_lose_it():
    policy = policy_of()
    assert not is_due(policy, 3) and is_due(policy, 7)


def test_helper_that_never_got_to_work_is_known_to_cost_at_least_what_it_took():
    policy, done = policy_of(), WaitingRatios(rollout_start_s=0.0, last_arrival_s=90.0, compute_s=12.0)

    def end(**seconds: float) -> bool:
        policy.end_round(done, is_long=False, **{"start_s": 0.0, "hand_over_s": 0.0, "helper_s": 0.0} | seconds)
        return policy.is_due_at_end(WaitingRatios(rollout_start_s=0.0), is_long=False)

    assert end() and not end(start_s=15.0)
    assert not end(start_s=3.0)  # again without help: no less than before
    assert end(start_s=1.0, hand_over_s=1.0, helper_s=2.0)


@pytest.mark.parametrize("release_at", [0.0, 1.0])
def test_last_try_is_when_the_rollout_is_over(release_at):
    """Nothing runs that the cache would have to hold; a fixed fraction of 1 is that moment."""
    full = {"kv_tokens": 10, "kv_usage": 1.0}
    policy = policy_of(release_at=release_at, actor_0=full)
    assert not any(is_due(policy, n) for n in range(R + 1))
    assert policy.is_due_at_end(WaitingRatios(rollout_start_s=0.0), is_long=False) and policy.released_at == 1.0
    assert not policy.is_due_at_end(WaitingRatios(rollout_start_s=0.0), is_long=False)


def test_fixed_fraction_needs_no_criteria():
    full = {"kv_tokens": 10, "kv_usage": 1.0}
    policy = policy_of(release_at=0.6, actor_0=full, actor_2=full)
    assert [n for n in range(R) if is_due(policy, n)] == [12]


def test_engines_that_stay_must_hold_what_is_cached_and_its_projected_peak():
    def asks(**reports):
        policy = policy_of(**reports)
        rng = np.random.default_rng(0)
        group = random_group(rng, "t")
        rollouts = tuple(
            dataclasses.replace(
                r,
                tokens=np.zeros(n, np.int32),
                loss_mask=np.ones(n, bool),
                behavior_logprobs=np.zeros(n, np.float32),
                token_versions=np.zeros(n, np.int32),
            )
            for r, n in zip(group.rollouts, (10, 90, 90), strict=True)
        )
        policy.observe(
            dataclasses.replace(group, prompt_tokens=np.zeros(10, np.int32), rollouts=rollouts), is_long=False
        )
        return is_due(policy, 4)

    def engines(**fields):
        return {f"actor_{i}": fields for i in range(4)}

    # The longer half needs 100 tokens a request; two engines that stay hold 0.9 of 2,000.
    assert asks(**engines(kv_tokens=1000, num_running=4, num_engine_waiting=0))
    assert not asks(**engines(kv_tokens=1000, num_running=4, num_engine_waiting=1))
    # 4,000 tokens at 0.45 are as many as 0.9 of 2,000.
    assert asks(**engines(kv_tokens=1000, num_running=1, kv_usage=0.45))
    assert not asks(**engines(kv_tokens=1000, num_running=1, kv_usage=0.46))
    # An engine that is asleep holds nothing.
    assert not asks(asleep=("actor_1",), **engines(kv_tokens=1000, num_running=4))
    # A restarted actor is of the same engine, and only the helper's engines are not enough.
    assert not asks(**{"actor_2-r1": {}, "actor_3": {}})


def test_round_like_one_that_the_help_made_no_faster_is_left_alone():
    def asks(*, device_s, **fields):
        policy = policy_of(**fields)
        end_round(policy, device_s=device_s)
        return is_due(policy, 4, start_s=60.0, train_s=70.0)

    # 40 s into a rollout of 120 s: training of 100 s ends with it anyway, training of 300 s does not.
    assert not asks(device_s=100.0) and asks(device_s=300.0)
    # Help that saves 177 s, and costs 182 s to end.
    assert not asks(device_s=300.0, actor_0={"wake_s": 180.0})
    assert asks(device_s=100.0, num_own=0)  # a learner without devices of its own has no choice


def test_long_rounds_are_judged_by_long_rounds():
    policy = policy_of()
    end_round(policy)
    assert not is_due(policy, 4, is_long=False)
    end_round(policy)
    assert is_due(policy, 4, is_long=True)
