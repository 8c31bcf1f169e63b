"""Deltas as a reader fetches them: from a folder, from a bucket and from the real server."""

import asyncio
import dataclasses
import fcntl
import os
import threading

import numpy as np
import pytest

from bridge import codec
from bridge.credentials import Tls, Token
from bridge.files import try_flock
from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.remote.download import DownloadStoppedError, RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.range_server import SnapshotServer, listen, url_of
from bridge.snapshots.remote.shard_fetch import base_in
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, manifest_path, sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import is_verified, map_tensors
from bridge.weight_types import Announcement
from tests.bridge.factories import with_piece
from tests.bridge.snapshots.whole import put, write_whole

RUN = "run-1"
PATIENCE = RetryPolicy(first_backoff_s=0.0, last_backoff_s=0.0, give_up_s=0.0)
TOKEN = Token("t" * 40)


def at(step):
    return Version(incarnation=0, step=step)


def weights(step, size=100_000):
    """A step moves a few of them, and none of the later half."""
    values = np.random.default_rng(0).normal(0, 0.02, size).astype(np.float32)
    for s in range(step):
        moved = np.random.default_rng(s + 1).integers(0, size // 2, 500)
        values[moved] *= 1.01
    return {"w": values}


class Learner:
    """Writes versions and puts them into a folder bucket."""

    def __init__(self, tmp_path, **options):
        self.folder = tmp_path / "snap"
        self.writer = SnapshotWriter(
            self.folder, run=RUN, tokenizer_hash="t", chunk_bytes=4096, token=TOKEN, full_every=100, **options
        )
        self.root = tmp_path / "bucket"
        self.bucket = SnapshotBucket(self.root.as_uri(), self.folder, run=RUN, keep=2)

    def publish(self, step, **sizes):
        manifest = write_whole(self.writer, at(step), weights(step, **sizes), dtype="bfloat16")
        return sign(Announcement(manifest=manifest, sources=put(self.bucket, manifest)), TOKEN)

    def file(self, step, name):
        return self.root / "v1" / RUN / f"0:{step}" / name


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path)


@pytest.fixture
def fetcher():
    made = make_fetcher()
    yield made
    made.close()


def make_fetcher(**options):
    return SnapshotFetcher(run=RUN, tokenizer_hash="t", token=TOKEN, patience=PATIENCE, **options)


def fetch(fetcher, announcement, into, base=None, stop=None):
    tally = fetcher.fetch(announcement, into, stop=stop or threading.Event(), base=base)
    assert is_verified(into) == announcement.manifest
    return tally


def assert_holds(path, manifest, step):
    got = map_tensors(path, manifest)["w"]
    want = weights(step)["w"].astype(got.dtype)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_reader_that_holds_the_base_fetches_the_delta_alone(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    first = learner.publish(1)
    full = fetch(fetcher, first, a, base=b)
    assert full.num_bytes == first.manifest.shards[0].file.num_bytes and full.num_by_delta == 0
    second = learner.publish(2)
    assert second.manifest.shards[0].delta is not None
    learner.file(2, second.manifest.shards[0].file.name).unlink()  # nobody needs it
    tally = fetch(fetcher, second, b, base=a)
    assert_holds(b, second.manifest, 2)
    assert tally.num_bytes == second.manifest.shards[0].delta.num_bytes < second.manifest.shards[0].file.num_bytes / 20
    assert tally.num_by_delta == second.manifest.shards[0].file.num_chunks and tally.num_failed_deltas == 0
    third = learner.publish(3)
    tally = fetch(fetcher, third, a, base=b)
    assert_holds(a, third.manifest, 3)
    assert tally.num_failed_deltas == 0 and tally.num_bytes < third.manifest.shards[0].file.num_bytes / 20


def test_reader_that_lacks_the_base_fetches_the_full_file(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    learner.publish(2)
    third = learner.publish(3)  # its delta is against 2
    tally = fetch(fetcher, third, b, base=a)
    assert_holds(b, third.manifest, 3)
    assert (tally.num_by_delta, tally.num_failed_deltas) == (0, 0)
    assert tally.num_bytes == third.manifest.shards[0].file.num_bytes


@pytest.mark.parametrize("place", [5_000, 150_000])  # in a chunk that changed, and in one that didn't
def test_base_that_is_not_what_its_manifest_says_is_not_believed(learner, fetcher, tmp_path, place):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    with open(a, "r+b") as file:
        file.seek(place)
        file.write(b"\xff\xff")
    second = learner.publish(2)
    tally = fetch(fetcher, second, b, base=a)
    assert_holds(b, second.manifest, 2)
    num = second.manifest.shards[0].file.num_chunks
    assert tally.num_failed_deltas == 1 and tally.num_by_delta < num
    start, end = second.manifest.shards[0].file.chunk(0)
    assert tally.num_bytes >= end - start  # the chunk that could not be made was fetched


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "codec", "other"])
def test_delta_that_fails_is_counted_and_the_full_file_is_fetched(learner, fetcher, tmp_path, damage):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    second = learner.publish(2)
    assert second.manifest.shards[0].delta is not None
    path = learner.file(2, second.manifest.shards[0].delta.name)
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif damage == "cut":
        path.write_bytes(data[:100])
    elif damage == "gone":
        path.unlink()
    elif damage == "other":
        path.write_bytes(np.random.default_rng(0).bytes(len(data)))
    else:
        delta = dataclasses.replace(second.manifest.shards[0].delta, codec="lzma")
        manifest = sign(with_piece(second.manifest, delta=delta), TOKEN)
        second = sign(dataclasses.replace(second, manifest=manifest), TOKEN)
    tally = fetch(fetcher, second, b, base=a)
    assert tally.num_failed_deltas == 1
    assert_holds(b, second.manifest, 2)


def test_bad_delta_and_no_full_file_leave_the_older_version_whole(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    first = learner.publish(1)
    fetch(fetcher, first, a, base=b)
    second = learner.publish(2)
    assert second.manifest.shards[0].delta is not None
    for name in (second.manifest.shards[0].delta.name, second.manifest.shards[0].file.name):
        learner.file(2, name).unlink()
    with pytest.raises(SupersededError):
        fetch(fetcher, second, b, base=a)
    assert is_verified(b) is None and is_verified(a) == first.manifest
    assert_holds(a, first.manifest, 1)


def test_base_whose_manifest_is_damaged_or_missing_is_left_out(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    second = learner.publish(2)
    manifest_path(a).write_bytes(b"rubbish")
    assert fetch(fetcher, second, b, base=a).num_by_delta == 0
    b.unlink()
    manifest_path(b).unlink()
    manifest_path(a).unlink()
    assert fetch(fetcher, second, b, base=a).num_by_delta == 0
    assert_holds(b, second.manifest, 2)


def test_base_that_is_shorter_than_it_must_be_is_left_out(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    second = learner.publish(2)
    os.truncate(a, 4096)
    assert fetch(fetcher, second, b, base=a).num_by_delta == 0
    assert_holds(b, second.manifest, 2)


def test_base_of_another_layout_is_left_out(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1, size=50_000), a, base=b)
    second = learner.publish(2)
    assert second.manifest.shards[0].delta is None
    fetch(fetcher, second, b, base=a)
    assert_holds(b, second.manifest, 2)


def test_stop_in_the_middle_of_a_delta_stops_the_download(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadStoppedError):
        fetch(fetcher, learner.publish(2), b, base=a, stop=stop)
    assert is_verified(b) is None


def test_two_copies_of_a_host_take_turns_and_follow_by_deltas_alone(learner, tmp_path):
    shared = SharedDownload(tmp_path / "shm", run=RUN, fetcher=make_fetcher())
    stop = threading.Event()
    shared.fetch(learner.publish(1), stop=stop)
    for step in range(2, 7):
        announcement = learner.publish(step)
        learner.file(step, announcement.manifest.shards[0].file.name).unlink()
        path = shared.fetch(announcement, stop=stop)
        assert_holds(path, announcement.manifest, step)
    shared.close()


def test_reader_whose_version_was_deleted_meanwhile_takes_the_next_one(learner, fetcher, tmp_path):
    old = learner.publish(1)
    for step in (2, 3, 4, 5):
        newest = learner.publish(step)
    with pytest.raises(SupersededError, match="0:1 was superseded"):
        fetch(fetcher, old, tmp_path / "copy-0")
    fetch(fetcher, newest, tmp_path / "copy-0")
    assert_holds(tmp_path / "copy-0", newest.manifest, 5)


@pytest.mark.integration
def test_delta_comes_from_the_server_as_from_a_bucket(learner, fetcher, tmp_path):
    listener, tls = listen("127.0.0.1:0", scheme="http", token=TOKEN, tls=Tls())
    server = SnapshotServer(learner.folder, listener, token=TOKEN, tls=tls, reader_grace_s=1.0)
    loop = asyncio.new_event_loop()
    running = loop.create_task(server.run())
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([running]),))
    thread.start()
    try:
        base = url_of(listener, "http")
        a, b = tmp_path / "copy-0", tmp_path / "copy-1"
        for step, into, before in ((1, a, b), (2, b, a), (3, a, b)):
            manifest = write_whole(learner.writer, at(step), weights(step), dtype="bfloat16")
            source = version_url(base, RUN, manifest.version)
            announcement = sign(Announcement(manifest=manifest, sources=(source,)), TOKEN)
            tally = fetch(fetcher, announcement, into, base=before)
            assert_holds(into, manifest, step)
            if step > 1:
                assert manifest.shards[0].delta is not None
                assert tally.num_bytes == manifest.shards[0].delta.num_bytes and tally.num_failed_deltas == 0
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()
        loop.close()


def test_manifest_with_a_delta_travels_as_it_is(learner):
    learner.publish(1)
    announcement = learner.publish(2)
    assert codec.decode(Announcement, codec.encode(announcement)) == announcement


def test_delta_in_an_unsigned_manifest_is_refused(learner, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, learner.publish(1), a, base=b)
    second = learner.publish(2)
    forged = dataclasses.replace(second, manifest=with_piece(second.manifest, delta=None))
    with pytest.raises(SnapshotError, match="not signed"):
        fetch(fetcher, forged, b, base=a)


def test_base_may_be_overwritten_after_a_fetch_that_failed(learner, fetcher, tmp_path):
    a = tmp_path / "copy-0"
    fetch(fetcher, learner.publish(1), a)
    with pytest.raises(SnapshotError), base_in(a, learner.publish(2).manifest) as base:
        assert base is not None
        raise SnapshotError("superseded")
    with open(a, "r+b") as file:
        assert try_flock(file.fileno(), fcntl.LOCK_EX)
