"""The order in which readers ask the learner's hosts, and the connections that they take."""

import collections

import pytest

from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.shard_fetch import num_connections, rotated


@pytest.mark.parametrize("num_hosts", [1, 2, 5, 16, 64])
def test_each_reader_asks_for_every_piece_once_in_the_order_of_hosts(num_hosts):
    hosts = list(range(num_hosts))
    for reader in ("actor-0", "gke-node-7f9c", ""):
        order = rotated(hosts, reader)
        assert sorted(order) == hosts
        assert [(b - a) % num_hosts for a, b in zip(order, order[1:], strict=False)] == [1 % num_hosts] * (
            num_hosts - 1
        )
        assert order == rotated(hosts, reader)  # the same with each version


@pytest.mark.parametrize("name", ["actor-{}", "node-{}.cluster", "tpu-v5p-64-actors-6d4cf56db6-{:05}"])
def test_readers_begin_with_different_hosts(name):
    first = collections.Counter(rotated(range(16), name.format(i))[0] for i in range(512))
    # 32 a host on average; by chance one of 16 is hardly ever above 60 (five deviations).
    assert len(first) == 16 and max(first.values()) < 60


def test_no_pieces_have_no_order():
    assert rotated([], "actor") == []


@pytest.mark.parametrize(
    ("num_pieces", "want"),
    [(1, 4), (2, 4), (3, 3), (4, 4), (5, 5), (16, 16), (64, 64), (65, 64), (256, 64)],  # by the docs of MAX_CONNECTIONS
)
def test_connections_of_a_reader_are_its_ranges_over_the_pieces_that_it_reads_at_once(num_pieces, want):
    assert num_connections(num_pieces, RetryPolicy()) == want
