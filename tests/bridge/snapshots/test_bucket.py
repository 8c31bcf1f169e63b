"""Versions in a bucket: a folder, and S3 as moto's server speaks it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path

import numpy as np
import obstore
import pytest

from bridge import codec
from bridge.credentials import Token
from bridge.object_store import open_source
from bridge.rollout_types import Version
from bridge.snapshots.bucket import (
    SnapshotBucket,
    expired,
    place_of_run,
    read_bucket_manifest,
    stored_versions,
)
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import SnapshotError, SupersededError, sign
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import is_verified
from bridge.weight_types import Announcement
from tests.bridge.snapshots.whole import put, write_whole

pytestmark = pytest.mark.heavy

RUN = "run-1"
TOKEN = Token("0123456789abcdef" * 2)


def at(step, incarnation=0):
    return Version(incarnation=incarnation, step=step)


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3, and the environment that leads there."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name="us-east-1")
        yield client
    server.stop()


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    if request.param == "file":
        return (tmp_path / "bucket").as_uri()
    client = request.getfixturevalue("s3")
    name = f"weights-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    return f"s3://{name}/some/prefix"


def newest(place):
    """The manifest of the newest version that is there whole; None if none is."""
    whole = [v for v, objects in stored_versions(place).items() if objects.is_whole]
    return read_bucket_manifest(place, max(whole)) if whole else None


def make_bucket(url, publisher, keep=2, **options):
    return SnapshotBucket(
        url, publisher.folder, run=RUN, keep=keep, timeout_s=10, max_retries=0, pause=lambda _: None, **options
    )


class Publisher:
    """A writer and its versions."""

    def __init__(self, folder, incarnation=0, num_values=20_000, **options):
        self.folder, self.incarnation, self.num_values = folder, incarnation, num_values
        self.writer = SnapshotWriter(folder, run=RUN, tokenizer_hash="t", chunk_bytes=4096, token=TOKEN, **options)

    def write(self, step):
        value = np.random.default_rng(0).normal(0, 1, self.num_values).astype(np.float32)
        value[:3] = step
        return write_whole(self.writer, at(step, self.incarnation), {"w": value}, dtype="float32")

    def data(self, manifest):
        return np.fromfile(
            self.folder / manifest.shards[0].file.name, np.uint8, count=manifest.shards[0].file.num_bytes
        ).tobytes()


@pytest.fixture
def publisher(tmp_path):
    return Publisher(tmp_path / "snap", full_every=4)


def place_at(url):
    return open_source(place_of_run(url, RUN), max_retries=0, is_written=True)  # tests damage what is there


def whole(url):
    return [v for v, stored in stored_versions(place_at(url)).items() if stored.is_whole]


def test_version_that_was_put_is_there_byte_for_byte(url, publisher):
    bucket = make_bucket(url, publisher, part_bytes=5 * 2**20)
    publisher.write(1)
    manifest = publisher.write(2)
    assert put(bucket, manifest) == (f"{url}/v1/{RUN}/0:2",)
    at_source = open_source(f"{url}/v1/{RUN}/0:2")
    assert bytes(obstore.get(at_source, manifest.shards[0].file.name).bytes()) == publisher.data(manifest)
    assert manifest.shards[0].delta is not None
    delta = (publisher.folder / manifest.shards[0].delta.name).read_bytes()
    assert bytes(obstore.get(at_source, manifest.shards[0].delta.name).bytes()) == delta
    assert read_bucket_manifest(place_at(url), at(2)) == manifest == newest(place_at(url))


def test_versions_over_the_bound_are_deleted_but_not_the_base_of_a_kept_delta(url, publisher):
    bucket = make_bucket(url, publisher, keep=2)
    seen = []
    for step in range(1, 10):  # 1, 5 and 9 are full
        put(bucket, publisher.write(step))
        seen.append([v.step for v in whole(url)])
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [5, 6], [5, 6, 7], [6, 7, 8], [7, 8, 9]]
    assert set(stored_versions(place_at(url))) == {at(7), at(8), at(9)}  # nothing of the deleted ones is left


def test_learner_that_starts_again_goes_on_where_the_last_one_ended(url, publisher, tmp_path):
    first = make_bucket(url, publisher, keep=2)
    for step in (1, 2, 3):
        put(first, publisher.write(step))
    publisher.writer.close()
    again = Publisher(publisher.folder, incarnation=1, full_every=4)
    second = make_bucket(url, publisher, keep=2)  # knows nothing of what is there but what is there
    put(second, again.write(2))
    assert whole(url) == [at(2), at(3), at(2, 1)]  # 3 has a delta against 2
    put(second, again.write(3))
    assert whole(url) == [at(2, 1), at(3, 1)]


def test_version_of_a_store_replaced_by_an_older_copy_stays_beside_later_incarnations(url, publisher, tmp_path):
    later = Publisher(tmp_path / "later", incarnation=5, full_every=1)
    for step in (8, 9):
        put(make_bucket(url, later, keep=2), later.write(step))
    bucket = make_bucket(url, publisher, keep=2)
    for step in (1, 2, 3, 4):
        put(bucket, publisher.write(step))
    assert {at(3), at(4), at(8, 5), at(9, 5)} <= set(whole(url))


def test_version_that_a_newer_learner_is_putting_is_left_alone_by_the_one_before(url, publisher):
    place = place_at(url)
    left, newer = [f"0:{step}/slot-0" for step in (1, 2)], "1:0/slot-0"
    for key in (*left, newer):  # no manifest yet, or never
        obstore.put(place, key, b"data")
    if url.startswith("file"):  # a part of a file, which a listing leaves out, is all that there is yet of this one
        part = Path(place_of_run(url, RUN).removeprefix("file://")) / "1:1" / "slot-1#1"
        part.parent.mkdir()
        part.write_bytes(b"part")
    put(make_bucket(url, publisher), publisher.write(3))
    assert set(stored_versions(place)) == {at(3), at(0, incarnation=1)}
    assert bytes(obstore.get(place, newer).bytes()) == b"data"
    if url.startswith("file"):
        assert part.read_bytes() == b"part"


def test_other_runs_and_foreign_objects_under_the_same_prefix_are_left_alone(url, publisher):
    others = open_source(url, is_written=True)
    foreign = [
        "v1/run-10/0:1/slot-0",
        "v1/run/0:1/manifest",
        f"v1/{RUN}/notes/readme",
        f"v1/{RUN}/hello",
        "run-1/0:1/x",
    ]
    for key in foreign:
        obstore.put(others, key, b"mine")
    bucket = make_bucket(url, publisher, keep=1)
    for step in range(1, 8):
        put(bucket, publisher.write(step))
    assert whole(url) == [at(6), at(7)]
    for key in foreign:
        assert bytes(obstore.get(others, key).bytes()) == b"mine"


def keys_in(url):
    return {item["path"] for batch in obstore.list(open_source(url)) for item in batch}


def test_manifest_is_not_there_before_all_of_the_data(url, publisher, monkeypatch):
    bucket = make_bucket(url, publisher)
    publisher.write(1)
    manifest = publisher.write(2)
    real, order = obstore.put, []

    def watched(place, key, *args, **options):
        order.append((key, newest(place_at(url)) is None))
        return real(place, key, *args, **options)

    monkeypatch.setattr(obstore, "put", watched)
    put(bucket, manifest)
    assert [key for key, _ in order] == ["0:2/slot-1", "0:2/delta-1", "0:2/manifest"]
    assert all(nothing_yet for _, nothing_yet in order)


def test_upload_that_fails_is_tried_again_and_the_version_gets_there(url, publisher, monkeypatch):
    bucket = make_bucket(url, publisher)
    manifest = publisher.write(1)
    real, left = obstore.put, [2]

    def failing(place, key, *args, **options):
        if key.endswith("slot-0") and left[0]:
            left[0] -= 1
            raise obstore.exceptions.GenericError("the network\nDebug source: long")
        return real(place, key, *args, **options)

    monkeypatch.setattr(obstore, "put", failing)
    put(bucket, manifest)
    assert left == [0]
    assert newest(place_at(url)) == manifest


def test_upload_that_keeps_failing_is_an_error_and_the_next_version_goes_out(url, publisher, monkeypatch):
    bucket = make_bucket(url, publisher, keep=1)
    put(bucket, publisher.write(1))
    real = obstore.put

    def failing(place, key, *args, **options):
        if key.endswith("manifest"):
            raise obstore.exceptions.GenericError("no")
        return real(place, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", failing)
        with pytest.raises(SnapshotError, match="after 3 attempts: no$"):
            put(bucket, publisher.write(2))
    assert newest(place_at(url)) == read_bucket_manifest(place_at(url), at(1))
    put(bucket, publisher.write(3))
    # The data of 2, put without its manifest, is swept; of what 3 has its delta against, nothing is there to keep.
    assert set(stored_versions(place_at(url))) == {at(3)}


def test_bucket_that_cannot_be_reached_is_an_error_of_one_line(publisher, monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    bucket = make_bucket("s3://weights/prefix", publisher)
    with pytest.raises(SnapshotError, match="upload to .* failed") as failure:
        put(bucket, publisher.write(1))
    assert "\n" not in str(failure.value)


def test_bucket_without_permission_or_that_does_not_exist_is_an_error_of_one_line(s3, publisher):
    bucket = make_bucket("s3://there-is-none-such/prefix", publisher)
    with pytest.raises(SnapshotError, match="upload to .* failed") as failure:
        put(bucket, publisher.write(1))
    assert "\n" not in str(failure.value)


def test_version_that_was_superseded_meanwhile_is_left_out(url, publisher):
    bucket = make_bucket(url, publisher)
    old = publisher.write(1)
    publisher.write(2)
    with pytest.raises(SupersededError):
        put(bucket, old)
    assert not stored_versions(place_at(url))


def test_version_whose_memory_is_used_again_while_it_is_put_arrives_as_it_was(url, publisher, monkeypatch):
    bucket = make_bucket(url, publisher)
    publisher.write(1)
    manifest = publisher.write(2)
    data = publisher.data(manifest)
    delta = (publisher.folder / manifest.shards[0].delta.name).read_bytes()
    real = obstore.put

    def slow(place, key, *args, **options):
        if key.endswith("slot-1"):  # meanwhile two more are published, the second into the same slot
            publisher.write(3)
            assert publisher.write(4).shards[0].file.name == manifest.shards[0].file.name
        return real(place, key, *args, **options)

    monkeypatch.setattr(obstore, "put", slow)
    put(bucket, manifest)
    place = place_at(url)
    assert bytes(obstore.get(place, "0:2/slot-1").bytes()) == data != publisher.data(manifest)
    assert bytes(obstore.get(place, "0:2/delta-1").bytes()) == delta
    assert newest(place) == manifest


KILLED = """
    import os, sys
    import numpy as np
    import obstore
    from pathlib import Path
    from bridge.snapshots.bucket import SnapshotBucket
    from bridge.snapshots.snapshot_format import latest

    folder, url, step = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    real = obstore.put

    def until_killed(parts):
        for i, part in enumerate(parts):
            if i == 3:
                os.kill(os.getpid(), 9)
            yield part

    def put(place, key, data, **options):
        if step in key and not isinstance(data, bytes):  # in the middle of the data
            data = until_killed(data)
        elif step in key:  # before a small object
            os.kill(os.getpid(), 9)
        return real(place, key, data, **options)

    obstore.put = put
    bucket = SnapshotBucket(url, folder, run="run-1", keep=1, part_bytes=5 * 2**20)
    bucket.put_piece(latest(folder))
    bucket.put_manifest(latest(folder))
"""


@pytest.mark.integration
@pytest.mark.parametrize("where", ["slot-1", "delta-1", "manifest"])
def test_upload_killed_at_any_object_shows_nothing_and_the_next_one_sweeps_it(url, tmp_path, where):
    publisher = Publisher(tmp_path / "snap", num_values=5 * 2**20 - 4, full_every=4)
    bucket = make_bucket(url, publisher, keep=1)
    put(bucket, publisher.write(1))
    manifest = publisher.write(2)  # four parts, of the smallest size that S3 takes
    assert manifest.shards[0].file.name == "slot-1" and manifest.shards[0].delta is not None
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", textwrap.dedent(KILLED), publisher.folder, url, where]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, cwd=root, timeout=120)
    assert result.returncode == -signal.SIGKILL
    assert whole(url) == [at(1)]
    assert newest(place_at(url)) == read_bucket_manifest(place_at(url), at(1))
    again = make_bucket(url, publisher, keep=1)  # a learner that starts again
    put(again, publisher.write(3))
    assert set(stored_versions(place_at(url))) == {at(3)}
    if url.startswith("file"):  # not even a part of a file, which a listing would leave out
        files = [p for p in Path(url.removeprefix("file://")).rglob("*") if p.is_file()]
        assert {p.parent.name for p in files} == {"0:3"}


def test_bound_keeps_the_newest_and_the_bases_of_kept_deltas():
    versions = [at(3), at(1), at(2), at(1, incarnation=1)]
    bases = {at(2): frozenset({at(1)}), at(3): frozenset({at(2)})}
    assert expired(versions, keep=1, bases_of=bases) == [at(1), at(2), at(3)]
    assert expired(versions, keep=2, bases_of=bases) == [at(1)]
    assert expired(versions, keep=9, bases_of=bases) == []
    assert expired([], keep=1, bases_of={}) == []


def test_damaged_and_missing_manifests_are_errors_that_say_so(url, publisher):
    place = place_at(url)
    obstore.put(place, "0:1/manifest", b"rubbish")
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_bucket_manifest(place, at(1))
    with pytest.raises(SupersededError, match="not in the bucket"):
        read_bucket_manifest(place, at(2))


def test_manifest_of_a_bucket_that_is_too_large_is_not_even_read(tmp_path, monkeypatch):
    place = place_at((tmp_path / "bucket").as_uri())
    monkeypatch.setattr(codec, "MAX_BYTES", 1000)
    obstore.put(place, "0:1/manifest", bytes(1001))
    with pytest.raises(SnapshotError, match="limit is 1000"):
        read_bucket_manifest(place, at(1))


def test_damaged_manifest_in_the_bucket_does_not_stop_a_publish(url, publisher):
    obstore.put(place_at(url), "0:0/manifest", b"rubbish")
    bucket = make_bucket(url, publisher, keep=1)
    put(bucket, publisher.write(1))
    assert newest(place_at(url)) is not None


def test_reader_fetches_the_first_version_by_ranges_and_the_next_one_by_its_delta(url, publisher, tmp_path):
    bucket = make_bucket(url, publisher)
    patience = RetryPolicy(range_bytes=3 * 4096, first_backoff_s=0)
    fetcher = SnapshotFetcher(run=RUN, tokenizer_hash="t", token=TOKEN, patience=patience)
    copies, stop = [tmp_path / "copy-0", tmp_path / "copy-1"], threading.Event()
    fetched = []
    for step in range(2):
        manifest = publisher.write(step)
        announcement = sign(Announcement(manifest=manifest, sources=put(bucket, manifest)), TOKEN)
        into, base = copies[step], copies[1 - step]
        fetched.append(fetcher.fetch(announcement, into, stop=stop, base=base).num_bytes)
        assert into.read_bytes()[: manifest.shards[0].file.num_bytes] == publisher.data(manifest)
    assert manifest.shards[0].delta is not None
    assert fetched == [manifest.shards[0].file.num_bytes, manifest.shards[0].delta.num_bytes]
    fetcher.close()


def test_version_deleted_while_a_reader_reads_it_is_superseded_and_the_next_one_is_whole(url, tmp_path, monkeypatch):
    publisher = Publisher(tmp_path / "snap")
    bucket = make_bucket(url, publisher, keep=1)
    old = publisher.write(1)
    sources = put(bucket, old)
    patience = RetryPolicy(num_ranges=1, range_bytes=4096, first_backoff_s=0)
    fetcher = SnapshotFetcher(run=RUN, tokenizer_hash="t", token=TOKEN, patience=patience)
    real, asked, newer = obstore.get_async, [], []

    async def deleting(place, key, **options):
        asked.append(key)
        if len(asked) == 5:  # the reader has four chunks
            newer.append(publisher.write(2))
            newer.append(put(bucket, newer[0]))
        return await real(place, key, **options)

    monkeypatch.setattr(obstore, "get_async", deleting)
    into = tmp_path / "copy"
    with pytest.raises(SupersededError, match="version 0:1"):
        fetcher.fetch(sign(Announcement(manifest=old, sources=sources), TOKEN), into, stop=threading.Event())
    assert is_verified(into) is None
    young = sign(Announcement(manifest=newer[0], sources=newer[1]), TOKEN)
    tally = fetcher.fetch(young, into, stop=threading.Event())
    assert is_verified(into) == newer[0] and into.read_bytes()[: newer[0].shards[0].file.num_bytes] == publisher.data(
        newer[0]
    )
    # The chunks that were there and are the same are not fetched again.
    assert tally.num_bytes < newer[0].shards[0].file.num_bytes - 2 * 4096
    fetcher.close()


@pytest.mark.parametrize("url", ["https://host/x", "/folder", "ftp://x"])
def test_url_that_is_no_buckets_is_refused(url, publisher):
    with pytest.raises(ValueError, match="bucket: expected"):
        make_bucket(url, publisher)
