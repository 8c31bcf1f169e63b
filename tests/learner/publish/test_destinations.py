"""A slow destination that fails and heals; what it is asked for, and when."""

import itertools
import queue
import threading

import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import WeightManifest
from learner.distributed.channel import ProcessLostError
from learner.publish import destinations
from learner.publish.destinations import Destination, UploadQueue
from tests.bridge.snapshots.whole import write_whole

DEADLINE_S = 60.0


class Bucket:
    """A destination that does what it is told, put by put, then takes everything; what it was given and has."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.given = queue.SimpleQueue[int]()
        self.there: list[tuple[int, str]] = []
        self.lost = queue.SimpleQueue[ProcessLostError]()
        self.lane = UploadQueue(Destination(name="bucket", put=self._put, is_slow=True), self._on_there, self.lost.put)
        self.is_there = threading.Event()

    def _put(self, manifest):
        self.given.put(manifest.version.step)
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        return [f"s3://b/{manifest.version.step}"]

    def _on_there(self, manifest, sources):
        self.there.append((manifest.version.step, *sources))
        self.is_there.set()

    def next_given(self) -> int:
        return self.given.get(timeout=DEADLINE_S)


@pytest.fixture
def manifests(tmp_path):
    """Three versions' manifests."""
    writer = SnapshotWriter(tmp_path / "weights", run="r", tokenizer_hash="t")
    versions = [Version(incarnation=0, step=step) for step in range(3)]
    made: list[WeightManifest] = [
        write_whole(writer, v, {"w": np.zeros(4, np.float32)}, dtype="float32") for v in versions
    ]
    yield made
    writer.remove()


def pause_between_attempts(monkeypatch, pause_s: float) -> None:
    monkeypatch.setattr(destinations, "_FIRST_PAUSE_S", pause_s)
    monkeypatch.setattr(destinations, "_MAX_PAUSE_S", pause_s)


def end(bucket: Bucket) -> None:
    """Closes the lane at once; its thread is to end by itself."""
    bucket.lane.close(0)
    assert bucket.lane._thread is not None
    bucket.lane._thread.join(DEADLINE_S)
    assert not bucket.lane._thread.is_alive()


def test_outlet_that_heals_while_nothing_new_comes_gets_the_version_that_failed(manifests, monkeypatch):
    pause_between_attempts(monkeypatch, 0.0)
    bucket = Bucket(SnapshotError("away"), OSError("away"), SnapshotError("away"))
    bucket.lane.put(manifests[0])
    assert bucket.is_there.wait(DEADLINE_S)
    assert [bucket.next_given() for _ in range(4)] == [0] * 4 and bucket.given.empty()
    assert bucket.there == [(0, "s3://b/0")]
    assert bucket.lane.unsent_version is None
    assert (bucket.lane.num_failures, bucket.lane.num_replaced) == (3, 0)
    end(bucket)


def test_version_that_failed_gives_way_to_a_newer_one_at_once(manifests, monkeypatch):
    pause_between_attempts(monkeypatch, 10 * DEADLINE_S)
    bucket = Bucket(SnapshotError("away"))
    bucket.lane.put(manifests[0])
    assert bucket.next_given() == 0
    assert bucket.lane.is_busy  # who waits for it goes on waiting
    bucket.lane.put(manifests[1])
    assert bucket.is_there.wait(DEADLINE_S)
    assert bucket.next_given() == 1 and bucket.there == [(1, "s3://b/1")]
    assert (bucket.lane.num_failures, bucket.lane.num_replaced) == (1, 1)
    end(bucket)


def test_version_that_is_superseded_is_not_put_again(manifests, monkeypatch):
    pause_between_attempts(monkeypatch, 0.0)
    bucket = Bucket(SnapshotError("away"), SupersededError("a newer one is out"))
    bucket.lane.put(manifests[0])
    assert [bucket.next_given() for _ in range(2)] == [0, 0]
    bucket.lane.put(manifests[2])
    assert bucket.is_there.wait(DEADLINE_S)
    assert bucket.next_given() == 2 and bucket.there == [(2, "s3://b/2")]
    assert (bucket.lane.num_failures, bucket.lane.num_replaced) == (1, 1)
    end(bucket)


def test_close_ends_the_pause_of_a_version_that_failed(manifests, monkeypatch):
    pause_between_attempts(monkeypatch, 10 * DEADLINE_S)
    bucket = Bucket(*[SnapshotError("away")] * 9)
    bucket.lane.put(manifests[0])
    assert bucket.next_given() == 0
    end(bucket)
    assert bucket.given.empty() and bucket.there == []
    assert bucket.lane.unsent_version == manifests[0].version


def test_pauses_grow_to_a_few_seconds_and_never_end():
    assert list(itertools.islice(destinations._pauses(), 6)) == [1, 2, 4, 5, 5, 5]


def test_lost_host_ends_the_lane_and_nothing_is_put_again(manifests, monkeypatch):
    pause_between_attempts(monkeypatch, 0.0)
    lost = ProcessLostError("process 1 said nothing")
    bucket = Bucket(lost)
    bucket.lane.put(manifests[0])
    assert bucket.next_given() == 0
    assert bucket.lost.get(timeout=DEADLINE_S) is lost
    assert bucket.lane._thread is not None
    bucket.lane._thread.join(DEADLINE_S)
    bucket.lane.put(manifests[1])
    assert bucket.given.empty() and bucket.there == []
    assert bucket.lane.unsent_version == manifests[1].version
    bucket.lane.close(0.0)
