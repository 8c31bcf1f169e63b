"""What each part is asked for, and which is the first bottleneck, against sums done by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.snapshots.remote.connection_guard import MAX_CONNECTIONS
from launch.tools.plan.control_plane import capacity
from launch.tools.plan.control_plane.capacity import bottleneck, generate_groups_per_s, train_groups_per_s
from launch.tools.plan.control_plane.loads import Workload
from launch.tools.plan.profile import EngineProfile, LearnerProfile
from launch.tools.plan.workload import EpisodeProfile, LatencyProfile
from tests.launch.tools.plan.control_plane.setup import cluster_of, network, part_of, served, store
from tests.launch.tools.plan.setup import by_rounds, by_window, lengths, profile_of, publishing


def test_learner_trains_an_update_in_its_passes_its_step_and_its_export():
    # U = 2 groups of K = 2: 4 x 101 tokens at 0.01 s on 4 chips, 0.5 s of step, 0.25 s of export an update.
    profile = profile_of(
        learner=LearnerProfile(seconds_per_token=0.01, optimizer_step_s=0.5),
        publish=publishing(export_s=0.25),
        num_learner_chips=4,
    )
    config = by_window(U=2, K=2)
    rate = train_groups_per_s(config, profile, Workload.of(config, profile))
    assert rate == pytest.approx(2 / (404 * 0.01 / 4 + 0.5 + 0.25))


def test_engines_sample_as_many_as_they_have_places_for():
    # 10 tokens/s a sequence, 64 places: 640 tokens/s an engine, 200 a group.
    config = by_window(U=2, K=2, admission=dict(sequences=1000))
    profile = profile_of(num_engines=3)
    assert generate_groups_per_s(config, profile, Workload.of(config, profile)) == pytest.approx(3 * 640 / 200)


def test_engines_sample_no_more_than_admission_gives_them():
    config = by_window(U=2, K=2, admission=dict(sequences=30))
    cluster = cluster_of(config, num_engines=3)
    assert cluster.generate_groups_per_s == pytest.approx(30 * 10 / 200)
    assert "wider window" in part_of(cluster, "generation", groups_per_s=1).remedy


def test_engines_cache_bounds_how_many_run():
    # A sequence holds 1 + 100 / 2 tokens on average, so 510 tokens hold 10 of them.
    engine = dataclasses.replace(profile_of().engine, kv_capacity_tokens=510)
    assert cluster_of(engine=engine).generate_groups_per_s == pytest.approx(10 * 10 / 200)


def test_prompts_and_requests_cost_an_engine_what_its_profile_says():
    engine = EngineProfile(
        running=(64.0,), tokens_per_s=(640.0,), max_num_seqs=64, prefill_s_per_token=0.5, request_s=0.25
    )
    cluster = cluster_of(engine=engine)
    assert cluster.generate_groups_per_s == pytest.approx(1 / (2 * (100 / 640 + 0.5 + 0.25)))


def test_store_adds_up_what_groups_and_bytes_take():
    cluster = cluster_of(store=store(group_s=0.1, byte_s=1e-5))
    part = part_of(cluster, "store", groups_per_s=2.0)
    # 2 x (100 x 13 + 155) + 4 + 155 bytes.
    assert cluster.workload.group_bytes == 2 * 1455 + 159
    assert part.load == pytest.approx(2 * (0.1 + 1e-5 * 3069))
    assert part.mostly == "groups"


def test_single_samples_are_handed_in_one_by_one():
    config = served(by_window(U=2, K=4, admission=dict(unit="sample")))
    assert part_of(cluster_of(config, store=store()), "store", groups_per_s=1.0).load == pytest.approx(0.4)


def test_groups_in_a_bucket_cost_the_store_no_bytes(monkeypatch):
    fields = dict(store=store(byte_s=1e-5, link_bytes_per_s=1e6))
    config = served()

    def loads(bucket, inline_bytes):
        monkeypatch.setattr(capacity, "INLINE_BYTES", inline_bytes)
        at = dataclasses.replace(config.store, bucket=bucket)
        cluster = cluster_of(dataclasses.replace(config, store=at), **fields)
        parts = {p.name: p.load for p in cluster.parts(1.0)}
        return parts["store"], parts["store's link"]

    assert loads("", 1000) == pytest.approx((0.1 + 3069e-5, 3069))
    assert loads("s3://b", 1000) == pytest.approx((0.1, 0))
    assert loads("s3://b", 5000) == pytest.approx((0.1 + 3069e-5, 3069))  # they are no larger than that


def test_store_connections_are_those_of_all_engines_and_the_learner():
    cluster = cluster_of(store=store(max_connections=100, connections_per_process=3), num_engines=9)
    part = part_of(cluster, "store's connections", groups_per_s=0.0)
    assert (part.load, part.capacity) == (40, 100)  # and 10 besides
    assert part.remedy.startswith("max_connections=40 ")


def test_weights_load_links_by_hosts_and_versions():
    # 16 engines on 2 hosts, 4 chips on 2 hosts; 4 groups/s are 2 versions/s of 1,000 bytes.
    fields = network(
        learner_bytes_per_s=10_000, actor_bytes_per_s=3000, write_bytes_per_s=5000, engines_per_host=8,
        chips_per_learner_host=2,
    )  # fmt: skip
    cluster = cluster_of(network=fields, num_engines=16, num_learner_chips=4)
    loads = {p.name: (p.load, p.capacity) for p in cluster.parts(4.0)}
    assert loads["learner hosts' links"] == (2000, 10_000)
    assert loads["actor hosts' links"] == (2000, 3000)
    assert loads["learner hosts' writing"] == (1000, 5000)
    assert loads["snapshot servers' connections"] == (8, 2 * MAX_CONNECTIONS)
    assert loads["leading host's link"] == (4 * 3069, 10_000)


def test_first_to_give_out_is_learner_or_generation_without_store_and_network():
    slow_learner = cluster_of(learner=LearnerProfile(seconds_per_token=1.0))
    limit = bottleneck(slow_learner)
    assert limit.part.name == "learner compute" and limit.groups_per_s == pytest.approx(1 / 202)
    limit = bottleneck(cluster_of(learner=LearnerProfile(seconds_per_token=1e-9)))
    assert limit.part.name == "generation" and limit.groups_per_s == pytest.approx(3.2)


def test_first_to_give_out_is_the_store_at_the_pace_that_its_time_allows():
    limit = bottleneck(cluster_of(learner=LearnerProfile(seconds_per_token=1e-9), store=store(group_s=0.5)))
    assert limit.part.full_name == "store: groups" and limit.groups_per_s == pytest.approx(2)
    mended = bottleneck(
        cluster_of(learner=LearnerProfile(seconds_per_token=1e-9), store=store(group_s=0.5)), but={"store"}
    )
    assert mended.part.name == "generation"


def test_first_to_give_out_is_a_link_at_the_pace_at_which_versions_outrun_it():
    # Each update of 2 groups sends 1,000 bytes over 1,500 bytes/s.
    cluster = cluster_of(learner=LearnerProfile(seconds_per_token=1e-9), network=network(actor_bytes_per_s=1500))
    limit = bottleneck(cluster)
    assert limit.part.name == "actor hosts' links" and limit.groups_per_s == pytest.approx(3)


def test_too_few_connections_give_out_at_any_pace():
    limit = bottleneck(cluster_of(store=store(max_connections=3)))
    assert limit.part.name == "store's connections" and limit.groups_per_s == 0


RATES = st.floats(0, 1e-2)


@pytest.mark.heavy
@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.01, 1.0), RATES, RATES, RATES, RATES, st.booleans())
def test_more_engines_never_make_any_shared_part_less_loaded(engines, more, pace, claim, write, read, told, by_round):
    fields = dict(
        store=store(
            claim_call_s=claim, write_s=write, read_s=read, row_s=read / 100, listener_s=told, max_connections=9
        ),
        network=network(learner_bytes_per_s=1e4, actor_bytes_per_s=1e4, write_bytes_per_s=1e4, bucket_bytes_per_s=1e4),
    )
    config = served(by_rounds() if by_round else None, bucket="s3://b")

    def loads(num_engines):
        return {p.name: p.load for p in cluster_of(config, num_engines=num_engines, **fields).parts(pace)}

    few, many = loads(engines), loads(engines + more)
    assert few.keys() == many.keys()
    assert all(many[name] >= few[name] * (1 - 1e-12) for name in few)


@given(st.integers(1, 200), st.integers(1, 64), st.floats(0, 0.2), st.floats(0, 0.01), st.integers(500, 5000))
def test_nothing_gives_out_below_the_limit_and_something_does_at_it(engines, chips, group_s, claim_s, link):
    cluster = cluster_of(
        served(by_window(U=2, K=2, admission=dict(sequences=64 * engines))),
        num_engines=engines,
        num_learner_chips=chips,
        store=store(group_s=group_s, claim_call_s=claim_s),
        network=network(actor_bytes_per_s=link),
    )
    limit = bottleneck(cluster)
    assert limit.part.share == pytest.approx(1, rel=1e-3) or (limit.groups_per_s == 0 and limit.part.share > 1)
    if limit.groups_per_s:
        assert all(p.share <= 1 + 1e-6 for i in range(10) for p in cluster.parts(limit.groups_per_s * i / 10))


def test_lengths_are_means_over_many_problems():
    config = by_rounds(K=4)
    work = Workload.of(config, profile_of(response_tokens=lengths(10, 30), prompt_tokens=lengths(7)))
    assert work.response_tokens == pytest.approx(20, abs=1) and work.prompt_tokens == 7
    assert work.context_tokens == pytest.approx(7 + (100 + 900) / 2 / 20 / 2, abs=0.5)


def test_episodes_have_the_tokens_of_all_their_turns():
    episodes = EpisodeProfile(num_turns=lengths(3), step_s=LatencyProfile(mean_s=0.1), observation_tokens=5)
    profile = dataclasses.replace(profile_of(response_tokens=lengths(10), prompt_tokens=lengths(7)), episodes=episodes)
    work = Workload.of(by_rounds(K=4), profile)
    assert (work.response_tokens, work.observed_tokens, work.group_tokens) == (30, 10, 4 * (7 + 30 + 10))
    assert work.context_tokens == 7 + (0 + 15 + 30) / 3 + 10 / 2  # by turn: what was before it, and half of it
