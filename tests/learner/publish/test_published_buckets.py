"""A bucket beside other destinations: slow, hanging, healing, or the only one."""

import queue
import threading

import pytest

from bridge.snapshots.snapshot_format import SnapshotError, SupersededError
from bridge.weight_types import Announcement
from learner.publish import destinations, publisher
from learner.publish.destinations import Destination
from tests.learner.publish.published import (
    DEADLINE_S,
    assert_same,
    fresh_params_on_device,
    metrics_of,
    wanted_of,
)


class Bucket:
    """A slow destination behind a gate, and what entered it; what it took in lies under a URL."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), queue.SimpleQueue[int]()

    def put(self, manifest):
        self.entered.put(manifest.version.step)
        assert self.gate.wait(DEADLINE_S)
        return [f"s3://b/{manifest.version.step}"]

    @property
    def destination(self) -> Destination:
        return Destination(name="bucket", put=self.put, is_slow=True)


def server() -> Destination:
    return Destination(name="server", put=lambda m: [f"https://a/{m.version.step}"])


def test_bucket_that_hangs_for_ever_delays_nobody_and_its_versions_give_way_to_newer_ones(setup, monkeypatch):
    bucket, announced = Bucket(), list[Announcement]()
    published = setup.publisher(destinations=[bucket.destination, server()], announce=announced.append)
    setup.writer.gate.set()
    params = fresh_params_on_device()
    for step in range(6):
        published.publish(params, step=step)
        published.wait_until_published()  # though the bucket has got nothing
        if step == 0:
            assert bucket.entered.get(timeout=DEADLINE_S) == 0
    assert [a.sources for a in announced] == [(f"https://a/{step}",) for step in range(6)]
    assert metrics_of(published, "late", "destination_failures", "destination_replaced") == [0, 0, 4]
    assert_same(setup.tensors(), wanted_of(params))
    said = []
    monkeypatch.setattr(publisher.logging, "error", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(publisher, "BUCKET_WAIT_S", 1e-9)
    published.finish()
    assert len(said) == 1 and "publish incomplete version=2:5 destination=bucket" in said[0]
    monkeypatch.setattr(publisher, "_CLOSE_S", 0.0)
    published.close()
    bucket.gate.set()


def test_bucket_that_comes_back_gets_the_newest_version_which_is_announced_again_with_it(setup):
    bucket, announced = Bucket(), list[Announcement]()
    published = setup.publisher(destinations=[server(), bucket.destination], announce=announced.append)
    setup.writer.gate.set()
    for step in range(4):
        published.publish(fresh_params_on_device(), step=step)
        published.wait_until_published()
        if step == 0:
            assert bucket.entered.get(timeout=DEADLINE_S) == 0
    bucket.gate.set()
    published.finish()
    assert bucket.entered.get(timeout=DEADLINE_S) == 3 and bucket.entered.empty()
    assert [(a.manifest.version.step, a.sources) for a in announced] == [
        *((step, (f"https://a/{step}",)) for step in range(4)),
        (3, ("https://a/3", "s3://b/0")),  # an older one, for whoever reaches the bucket alone
        (3, ("https://a/3", "s3://b/3")),
    ]
    assert metrics_of(published, "destination_replaced") == [2]


def test_bucket_that_is_always_behind_is_announced_beside_each_version_by_what_it_has(setup):
    bucket, announced = Bucket(), list[Announcement]()
    published = setup.publisher(destinations=[server(), bucket.destination], announce=announced.append)
    setup.writer.gate.set()
    bucket.gate.set()
    published.publish(fresh_params_on_device(), step=0)
    published.finish()
    bucket.gate.clear()
    for step in (1, 2):
        published.publish(fresh_params_on_device(), step=step)
        published.wait_until_published()
    assert [a.sources for a in announced[1:]] == [
        ("https://a/0", "s3://b/0"),
        ("https://a/1", "s3://b/0"),
        ("https://a/2", "s3://b/0"),
    ]
    bucket.gate.set()


def test_bucket_alone_is_announced_version_by_version_as_they_get_there(setup):
    bucket, announced = Bucket(), list[Announcement]()
    published = setup.publisher(destinations=[bucket.destination], announce=announced.append)
    setup.writer.gate.set()
    first = published.publish(fresh_params_on_device(), step=0)
    published.wait_until_published()  # actors of this machine have it
    assert published.announced_version == first and announced == []
    assert bucket.entered.get(timeout=DEADLINE_S) == 0
    published.publish(fresh_params_on_device(), step=1)
    published.wait_until_published()
    bucket.gate.set()
    published.finish()
    assert [a.sources for a in announced] == [("s3://b/0",), ("s3://b/1",)]


@pytest.mark.heavy
def test_bucket_alone_that_heals_while_nothing_new_is_published_is_announced_with_the_version(setup, monkeypatch):
    failures = [SnapshotError("did not get there")] * 3

    def put(manifest):
        if manifest.version.step == 1 and failures:
            raise failures.pop()
        if manifest.version.step == 2:
            raise SupersededError("a newer one is out")
        return [f"s3://b/{manifest.version.step}"]

    monkeypatch.setattr(destinations, "_FIRST_PAUSE_S", 0.0)
    announced: list[Announcement] = []
    buckets = [Destination(name="bucket", put=put, is_slow=True)]
    published = setup.publisher(destinations=buckets, announce=announced.append)
    setup.writer.gate.set()
    for step in range(3):
        published.publish(fresh_params_on_device(), step=step)
        published.finish()
    assert [a.sources for a in announced] == [("s3://b/0",), ("s3://b/1",)]
    assert metrics_of(published, "destination_failures", "destination_replaced") == [3, 1]


def test_learner_hears_that_what_the_bucket_has_could_not_be_announced(setup):
    bucket, failure = Bucket(), SnapshotError("the store is lost")

    def announce(announcement):
        raise failure

    published = setup.publisher(destinations=[bucket.destination], announce=announce)
    setup.writer.gate.set()
    bucket.gate.set()
    published.publish(fresh_params_on_device(), step=0)
    with pytest.raises(SnapshotError) as raised:
        published.finish()
    assert raised.value is failure
