"""Bytes and seconds of a publish, against sums done by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.plan.control_plane.transfers import Transfers, publishes_per_s
from tests.launch.tools.plan.control_plane.setup import network, served
from tests.launch.tools.plan.setup import by_rounds, by_window, profile_of


def transfers_of(config, **fields) -> Transfers:
    made = Transfers.of(config, profile_of(**fields))
    assert made is not None
    return made


def test_download_is_as_slow_as_the_learner_hosts_links_or_the_actor_hosts_own():
    # 9 engines, 4 a host: 3 downloads of 1,000 bytes. 8 chips, 4 a host: 2 links of 100 bytes/s.
    sizes = dict(num_engines=9, num_learner_chips=8)
    links = dict(learner_bytes_per_s=100, chips_per_learner_host=4, engines_per_host=4)
    made = transfers_of(served(), network=network(**links), **sizes)
    assert (made.num_actor_hosts, made.num_learner_hosts) == (3, 2)
    assert made.download_s(1000) == pytest.approx(3 * 1000 / (2 * 100))
    slower = transfers_of(served(), network=network(**links, actor_bytes_per_s=40), **sizes)
    assert slower.download_s(1000) == pytest.approx(1000 / 40)


def test_the_slower_of_link_and_server_and_of_link_and_reader_counts():
    fields = dict(learner_bytes_per_s=100, serve_bytes_per_s=20, actor_bytes_per_s=30, fetch_bytes_per_s=50)
    made = transfers_of(served(), network=network(**fields))
    assert (made.send_bytes_per_s, made.receive_bytes_per_s) == (20, 30)
    assert made.download_s(1000) == pytest.approx(50)


def test_a_delta_goes_to_who_holds_the_version_before_and_not_in_every_nth():
    made = transfers_of(served(full_every=4), network=network(delta_bytes=50))
    assert [made.num_bytes(n, held=n - 1) for n in range(9)] == [1000, 50, 50, 50, 1000, 50, 50, 50, 1000]
    assert made.num_bytes(5, held=3) == 1000
    assert made.mean_bytes == pytest.approx((1000 + 3 * 50) / 4)


def test_a_bucket_takes_the_version_and_its_delta_and_serves_all_hosts():
    fields = dict(delta_bytes=50, bucket_bytes_per_s=500, learner_bytes_per_s=100, chips_per_learner_host=1)
    config = served(serve="none", bucket="s3://b", full_every=2)
    made = transfers_of(config, network=network(**fields), num_engines=6, num_learner_chips=3)
    assert made.way == "bucket"
    assert made.announce_s(1) == pytest.approx(1050 / (3 * 100))
    assert made.download_s(1000) == pytest.approx(6 * 1000 / 500)
    assert made.publish_s(2, held=0) == pytest.approx(1000 / 300 + 12)


def test_where_both_are_there_links_carry_downloads_and_the_bucket_uploads_alone():
    made = transfers_of(served(bucket="s3://b"), network=network(learner_bytes_per_s=100, bucket_bytes_per_s=1))
    assert made.way == "links"
    assert made.download_s(1000) == pytest.approx(10)
    assert made.mean_upload_bytes == 1000


def test_learner_hosts_write_their_rows_side_by_side():
    fields = network(write_bytes_per_s=100, chips_per_learner_host=2)
    assert transfers_of(served(), network=fields, num_learner_chips=2).announce_s(0) == pytest.approx(10)
    assert transfers_of(served(), network=fields, num_learner_chips=10).announce_s(0) == pytest.approx(2)


def test_shared_memory_moves_nothing_over_a_network():
    made = transfers_of(served(serve="none"), network=network(learner_bytes_per_s=1))
    assert made.way == "memory"
    assert made.publish_s(0, held=-1) == 0 and made.mean_bytes == 0


def test_versions_a_second_follow_from_groups_and_from_when_they_are_published():
    assert publishes_per_s(by_window(U=4), 8.0) == pytest.approx(2)
    assert publishes_per_s(by_window(U=4, every_n_steps=5), 8.0) == pytest.approx(0.4)
    assert publishes_per_s(by_rounds(R=8, U=2), 8.0) == pytest.approx(1)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 64), st.integers(1, 16))
def test_more_engines_never_make_a_download_shorter_nor_more_learner_chips_longer(engines, more, chips, per_host):
    fields = network(learner_bytes_per_s=70, actor_bytes_per_s=900, chips_per_learner_host=4, engines_per_host=per_host)

    def seconds(num_engines, num_learner_chips):
        made = Transfers.of(
            served(), profile_of(network=fields, num_engines=num_engines, num_learner_chips=num_learner_chips)
        )
        assert made is not None
        return made.download_s(1000)

    assert seconds(engines + more, chips) >= seconds(engines, chips)
    assert seconds(engines, chips + more) <= seconds(engines, chips)


def test_a_profile_without_a_network_has_no_transfers():
    assert Transfers.of(served(), profile_of()) is None
    assert dataclasses.replace(profile_of(), network=network()).network is not None
