"""A version of four hosts, fetched over HTTP from four servers, and out of a bucket that all of them fill."""

import contextlib
import dataclasses
import threading

import pytest

from bridge.object_store import open_source
from bridge.snapshots.bucket import SnapshotBucket, place_of_run, stored_versions
from bridge.snapshots.remote.download import DownloadStoppedError, RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import SnapshotError, UnreachableError, part_path, sign, version_url
from bridge.snapshots.verified_copy import is_verified
from bridge.weight_types import Announcement
from tests.bridge.snapshots.hosts import ENTRIES, HostWriters, alone
from tests.bridge.snapshots.served import CHUNK_BYTES, OTHER_TOKEN, RUN, TOKEN, TOKENIZER, ScriptedServer, serving

TABLE = {name: (dtype, shape) for name, dtype, shape in ENTRIES}
PATIENCE = RetryPolicy(
    num_ranges=4, range_bytes=2 * CHUNK_BYTES, silence_s=5.0, give_up_s=10.0, first_backoff_s=0.01, last_backoff_s=0.05
)
CLOSED = "http://127.0.0.1:1"


@pytest.fixture
def hosts(tmp_path):
    """Four, each on a machine of its own."""
    made = HostWriters([tmp_path / f"machine-{i}" for i in range(4)], full_every=100)
    yield made
    made.close()


@pytest.fixture
def urls(hosts):
    """Of each host's server."""
    with contextlib.ExitStack() as servers:
        yield [servers.enter_context(serving(folder, token=TOKEN)).url for folder in hosts.folders]


@pytest.fixture
def fetcher():
    made = SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER, expected=TABLE, token=TOKEN, patience=PATIENCE)
    yield made
    made.close()


def announced(manifest, urls, *, sources=()):
    places = tuple((version_url(url, RUN, manifest.version),) for url in urls)
    return sign(Announcement(manifest=manifest, sources=sources, host_sources=places), TOKEN)


def fetch(fetcher, announcement, into, *, base=None, stop=None):
    return fetcher.fetch(announcement, into, stop=stop or threading.Event(), base=base)


def holds(path, manifest, tmp_path):
    step = manifest.version.step
    return is_verified(path) == manifest and path.read_bytes()[: manifest.num_bytes] == alone(
        tmp_path / f"alone-{path.name}-{step}", step
    )


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    with open(path, "r+b") as f:
        f.write(data)


def test_pieces_of_four_servers_make_up_what_one_host_writes(hosts, urls, fetcher, tmp_path):
    for step in (1, 2):
        manifest = hosts.publish(step)
        tally = fetch(fetcher, announced(manifest, urls), tmp_path / "weights")
        assert holds(tmp_path / "weights", manifest, tmp_path)
    assert tally.num_bytes < sum(piece.file.num_bytes for piece in manifest.shards)  # like chunks were there already


@pytest.mark.heavy
def test_deltas_come_piece_by_piece_and_one_that_fails_is_fetched_in_full(hosts, urls, fetcher, tmp_path):
    a, b = tmp_path / "copy-0", tmp_path / "copy-1"
    fetch(fetcher, announced(hosts.publish(1), urls), a)
    second = hosts.publish(2)
    assert all(piece.delta is not None for piece in second.shards)
    tally = fetch(fetcher, announced(second, urls), b, base=a)
    assert holds(b, second, tmp_path) and tally.num_failed_deltas == 0
    assert tally.num_bytes == sum(piece.delta.num_bytes for piece in second.shards if piece.delta)
    third = hosts.publish(3)
    flip(tmp_path / "machine-2" / third.shards[2].delta.name, 60)
    tally = fetch(fetcher, announced(third, urls), a, base=b)
    assert holds(a, third, tmp_path) and tally.num_failed_deltas == 1
    assert tally.num_by_delta > 0


@pytest.mark.heavy
def test_host_that_is_out_of_reach_ends_the_fetch_and_what_arrived_stays(hosts, urls, fetcher, tmp_path):
    manifest, into = hosts.publish(1), tmp_path / "weights"
    fetcher._patience = dataclasses.replace(PATIENCE, give_up_s=1.0)
    with pytest.raises(UnreachableError, match="version 0:1: piece of host 2: .* 0 of "):
        fetch(fetcher, announced(manifest, [*urls[:2], CLOSED, urls[3]]), into)
    assert is_verified(into) is None and part_path(into).exists()
    tally = fetch(fetcher, announced(manifest, urls), into)  # it is back: only its piece is read
    assert tally.num_bytes == manifest.shards[2].file.num_bytes and holds(into, manifest, tmp_path)


def test_piece_of_a_lost_host_comes_out_of_the_bucket(hosts, urls, fetcher, tmp_path):
    buckets = [
        SnapshotBucket((tmp_path / "bucket").as_uri(), folder, run=RUN, keep=2, host=i)
        for i, folder in enumerate(hosts.folders)
    ]
    place = open_source(place_of_run((tmp_path / "bucket").as_uri(), RUN), is_written=True)
    for step in (1, 2, 3, 4):
        manifest = hosts.publish(step)
        for bucket in buckets[::-1]:
            assert (
                not stored_versions(place)
                or not stored_versions(place).get(manifest.version, None)
                or not (stored_versions(place)[manifest.version].is_whole)
            )
            bucket.put_piece(manifest)
        (url,) = buckets[0].put_manifest(manifest)
    # Two, and what their deltas lead from.
    assert [version.step for version, stored in stored_versions(place).items() if stored.is_whole] == [2, 3, 4]
    lost = announced(manifest, [*urls[:2], CLOSED, urls[3]], sources=(url,))
    fetch(fetcher, lost, tmp_path / "weights")
    assert holds(tmp_path / "weights", manifest, tmp_path)
    alone_in_bucket = sign(Announcement(manifest=manifest, sources=(url,)), TOKEN)
    fetch(fetcher, alone_in_bucket, tmp_path / "other")
    assert holds(tmp_path / "other", manifest, tmp_path)


def test_bad_chunk_of_one_host_is_fetched_again_and_given_up_in_the_end(hosts, urls, fetcher, tmp_path):
    manifest, into = hosts.publish(1), tmp_path / "weights"
    data = (tmp_path / "machine-1" / manifest.shards[1].file.name).read_bytes()
    told = []

    def once(request, connection):
        body = bytearray(data[request.start : request.end])
        if request.start == 0 and not told:
            told.append(request)
            body[7] ^= 1
        return bytes(body)

    bad = ScriptedServer(data[: manifest.shards[1].file.num_bytes], once)
    tally = fetch(fetcher, announced(manifest, [urls[0], bad.url, *urls[2:]]), into)
    assert tally.num_bad == 1 and holds(into, manifest, tmp_path)
    bad.close()
    flip(tmp_path / "machine-1" / manifest.shards[1].file.name, 4100)
    with pytest.raises(SnapshotError, match="piece of host 1: .*chunk 1 does not match its hash"):
        fetch(fetcher, announced(manifest, urls), tmp_path / "other")
    assert is_verified(tmp_path / "other") is None


def test_sources_of_hosts_that_the_token_has_not_signed_are_not_asked(hosts, urls, fetcher, tmp_path):
    announcement = announced(hosts.publish(1), urls)
    elsewhere = ScriptedServer(b"")
    other = dataclasses.replace(announcement, host_sources=(announcement.host_sources[0], *[(elsewhere.url,)] * 3))
    for forged in (other, sign(other, OTHER_TOKEN), dataclasses.replace(other, hmac=None)):
        with pytest.raises(SnapshotError, match="signed"):
            fetch(fetcher, forged, tmp_path / "weights")
    no_token = SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER)
    far = Announcement(
        manifest=announcement.manifest, sources=(), host_sources=(("https://far.example/v",), (), (), ())
    )
    with pytest.raises(SnapshotError, match="comes from another machine .https://far.example"):
        no_token.check(far)
    assert elsewhere.requests == []
    elsewhere.close()


def test_stop_ends_the_fetch_of_every_piece(hosts, urls, fetcher, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadStoppedError):
        fetch(fetcher, announced(hosts.publish(1), urls), tmp_path / "weights", stop=stop)
    assert is_verified(tmp_path / "weights") is None
