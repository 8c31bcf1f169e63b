"""Store and network in the simulation, against runs worked out by hand."""

import dataclasses

import pytest

from launch.tools.plan.control_plane.capacity import ClusterModel, StoreQueue, bottleneck
from launch.tools.plan.profile import LearnerProfile
from launch.tools.plan.sim.event_queue import EventQueue
from launch.tools.plan.sim.simulate import simulate
from tests.launch.tools.plan.control_plane.setup import network, served, store
from tests.launch.tools.plan.setup import by_window, profile_of, publishing


def test_groups_go_through_the_line_one_after_the_other():
    calendar, done = EventQueue(), []
    profile = profile_of(store=store(group_s=2.0))
    line = StoreQueue(served(), profile, store(group_s=2.0), calendar)
    for i in range(3):
        line.put(num_samples=2, prompt_tokens=1, response_tokens=200, then=lambda i=i: done.append((i, calendar.now_s)))
    while calendar.step():
        pass
    assert done == [(0, 2), (1, 4), (2, 6)]
    assert line.mean_s == pytest.approx(4)


def test_control_calls_stretch_what_a_group_takes():
    # An actor looks 5.6 times a second at 0.1 s each, whatever the pace: 0.44 of the store's time is left for groups.
    calendar, done = EventQueue(), []
    config = served(by_window(U=2, K=2, admission=dict(sequences=2, when_full="drop_oldest")))
    slow = store(group_s=1.0, read_s=0.1)
    line = StoreQueue(config, profile_of(store=slow), slow, calendar)
    line.put(num_samples=2, prompt_tokens=1, response_tokens=200, then=lambda: done.append(calendar.now_s))
    while calendar.step():
        pass
    assert done == [pytest.approx(1 / 0.44)]


def test_a_slow_store_sets_the_pace_that_the_limit_says():
    config = served(by_window(U=4, K=2, admission=dict(sequences=128)))
    profile = profile_of(learner=LearnerProfile(seconds_per_token=1e-6), store=store(group_s=1.0, byte_s=1e-5))
    outcome = simulate(config, profile, num_updates=20, warmup_updates=20)
    limit = bottleneck(ClusterModel.of(config, profile))
    assert limit.part.full_name == "store: groups"
    assert limit.groups_per_s == pytest.approx(1 / (1 + 3069e-5))
    assert outcome.samples_per_s / 2 == pytest.approx(limit.groups_per_s, rel=0.02)
    fast = simulate(config, dataclasses.replace(profile, store=None), num_updates=20, warmup_updates=20)
    assert fast.samples_per_s > 2 * outcome.samples_per_s and fast.store_s == 0


def test_engines_serve_a_version_when_it_was_written_noticed_fetched_and_loaded():
    # 100 bytes/s of writing, 50 of the link: 10 s and 20 s; 0.25 s to notice it and 0.5 s of pause.
    config = served(by_window(U=2, K=2, admission=dict(width=4), every_n_steps=1000))
    fields = network(write_bytes_per_s=100, actor_bytes_per_s=50)
    profile = profile_of(network=fields, publish=publishing(prefetch_s=0.25, pause_s=0.5))
    config = dataclasses.replace(config, publish=dataclasses.replace(config.publish, every_n_steps=20))
    outcome = simulate(config, profile, num_updates=40)
    assert outcome.update_s == pytest.approx(30.75)


def test_deltas_shorten_updates_and_lag_and_not_the_pause():
    config = served(by_window(U=2, K=2, admission=dict(width=4)))
    fields = network(delta_bytes=10, actor_bytes_per_s=50)
    profile = profile_of(network=fields, publish=publishing(pause_s=0.5))
    full = simulate(config, profile, num_updates=40, warmup_updates=10)
    by_delta = served(config, full_every=100)
    short = simulate(by_delta, profile, num_updates=40, warmup_updates=10)
    assert short.update_s < 1.5 and full.update_s > 20
    assert short.token_lag.mean < full.token_lag.mean
