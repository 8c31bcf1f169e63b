"""What the bench predicts, by hand, and that its clients do what it says."""

import dataclasses
from typing import Any

import pytest

from launch.tools.plan.profile import LearnerProfile, StoreProfile
from tests.bench.cluster import plan_table
from tests.bench.cluster.figure import scale, variants
from tests.bench.cluster.measured import Case, groups_per_s
from tests.bench.cluster.predicted import predicted_download_s, predicted_groups_per_s
from tests.integration.support.store_torture import Urls
from tests.launch.tools.plan.setup import by_window, profile_of


def case_of(**fields) -> Case:
    sizes: dict[str, Any] = dict(
        engine="sqlite", num_samples=2, num_tokens=100, num_producers=2, num_lookers=0, num_groups=5
    )
    return Case(**(sizes | fields))


def test_groups_of_a_store_without_other_costs_are_one_over_their_seconds():
    # 2 x (100 x 13 + 155) + 2 x 4 + 155 bytes; each group is claimed once.
    store = StoreProfile(group_s=0.1, byte_s=1e-4, claim_call_s=0.05)
    assert predicted_groups_per_s(store, case_of()) == pytest.approx(1 / (0.1 + 3073e-4 + 0.05), rel=1e-3)


def test_actors_that_look_take_their_part_of_the_store():
    # 12 actors with 5.6 reads a second each: leases, announcements, the end, and one with every heartbeat.
    store = StoreProfile(group_s=0.1, read_s=0.005)
    looks = 12 * (1 + 4 + 0.1 + 0.5) * 0.005
    got = predicted_groups_per_s(store, case_of(num_lookers=10))
    assert got == pytest.approx((1 - looks) / 0.1, rel=1e-3)


def test_a_download_is_as_long_as_its_bytes_on_the_link():
    assert predicted_download_s(606_160_896, link_bytes_per_s=100e6) == pytest.approx(6.0616, rel=1e-3)


def test_a_store_ten_times_as_fast_is_that_in_all_its_seconds():
    profile = dataclasses.asdict(profile_of(store=StoreProfile(group_s=0.5, read_s=0.25)))
    store = variants(profile)[-1].profile.store
    assert store is not None and (store.group_s, store.read_s, store.max_connections) == (0.05, 0.025, 20000)


def test_changes_are_found_to_the_engine():
    assert plan_table.changes(lambda n: (n >= 77) + (n >= 1000)) == [(1, 0), (77, 1), (1000, 2)]
    assert plan_table.changes(lambda n: (n >= 66) + (n >= 70)) == [
        (1, 0),
        (66, 1),
        (70, 2),
    ]  # between two that are tried
    assert plan_table.changes(lambda n: "") == [(1, "")]


def test_generation_gives_out_above_the_balance_and_the_learner_below_it():
    # An engine samples 640 tokens/s, a chip trains 160: four chips an engine balance.
    profile = profile_of(learner=LearnerProfile(seconds_per_token=100 / 101 / 160))
    config = by_window(U=2, K=2)
    cells = scale(config, profile, engines=(1, 4), learner_chips=(1, 2, 8, 64))
    names = [[c.limit.part.name for c in row] for row in cells]
    assert names == [["learner compute"] * 2] * 2 + [["generation", "learner compute"], ["generation"] * 2]
    assert cells[0][0].tokens_per_s == pytest.approx(160, rel=0.01)
    assert cells[3][1].tokens_per_s == pytest.approx(4 * 640, rel=0.01)


@pytest.mark.integration
@pytest.mark.heavy
def test_groups_come_from_producers_beside_actors_that_look(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    assert groups_per_s(Urls(learner=url, actor=url), case_of(num_lookers=3)) > 0
