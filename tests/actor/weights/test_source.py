import asyncio
import contextlib
import dataclasses
import pathlib
import threading

import numpy as np
import pytest

from actor.weights import source
from actor.weights.client import FIRST_RETRY_S, WeightClient
from actor.weights.source import FIRST_ASK_S, RemoteSource
from bridge import codec
from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import MANIFEST, sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from bridge.timeline import Timeline
from bridge.weight_types import Announcement, WeightManifest
from tests.actor.fakes import FakeEngine
from tests.bridge.snapshots.served import (
    NUM_VALUES,
    OTHER_TOKEN,
    RUN,
    TOKEN,
    TOKENIZER,
    ScriptedServer,
    at,
    open_writer,
    publish,
    serving,
    values,
)
from tests.bridge.snapshots.whole import put, write_whole

TABLE = {"w": ("float32", (NUM_VALUES,))}
DEAD = "http://127.0.0.1:1"
PATIENCE = RetryPolicy(silence_s=1e6, give_up_s=0.5, first_backoff_s=0.01, last_backoff_s=0.02)


class AnnouncingStore:
    """The one call of a store that a source makes."""

    def __init__(self) -> None:
        self.announcement: Announcement | None = None
        self.threads: set[int] = set()

    def announced(self) -> Announcement | None:
        self.threads.add(threading.get_ident())
        return self.announcement


class LoadingEngine(FakeEngine):
    """Remembers what the file held when it was told to load it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[np.ndarray] = []

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest):
        self.loaded.append(map_tensors(path, manifest)["w"].copy())
        return await super().swap_weights(path, manifest)


@dataclasses.dataclass
class Setup:
    root: pathlib.Path
    url: str
    writer: SnapshotWriter
    store: AnnouncingStore
    engine: LoadingEngine
    client: WeightClient
    now: list[float]

    def publish(self, step: int) -> WeightManifest:
        manifest = publish(self.writer, step)
        self.announce(manifest)
        return manifest

    def announce(self, manifest: WeightManifest) -> None:
        place = version_url(self.url, manifest.run, manifest.version)
        self.store.announcement = sign(Announcement(manifest=manifest, sources=(place,)), TOKEN)

    @property
    def bucket(self) -> str:
        return (self.root / "bucket").as_uri()

    def put(self, step: int) -> pathlib.Path:
        """Publishes a version and puts it into the bucket, where it lies under the path."""
        manifest = publish(self.writer, step)
        put(SnapshotBucket(self.bucket, self.root / "w", run=RUN, keep=9), manifest)
        return self.root / "bucket" / "v1" / RUN / str(manifest.version)

    def announce_behind_a_wall(self, step: int, *, beside: int, url: str = DEAD) -> None:
        """Publishes a version that the actor can't reach, or can at `url`, beside an older one in the bucket."""
        manifest = publish(self.writer, step)
        places = version_url(url, RUN, manifest.version), version_url(self.bucket, RUN, at(beside))
        self.store.announcement = sign(Announcement(manifest=manifest, sources=places), TOKEN)

    def follow(self) -> bool:
        async def body() -> bool:
            manifest = await self.client.prefetch()
            return manifest is not None and await self.client.swap(manifest)

        return asyncio.run(body())


def open_client(root: pathlib.Path, store: AnnouncingStore, engine: LoadingEngine, now: list[float]) -> WeightClient:
    fetcher = SnapshotFetcher(
        run=RUN, tokenizer_hash=TOKENIZER, expected=TABLE, token=TOKEN, patience=PATIENCE, lock_timeout_s=0.05
    )
    shared = SharedDownload(root / "memory", run=RUN, fetcher=fetcher)
    remote = RemoteSource(store, shared, clock=lambda: now[0])  # pyright: ignore[reportArgumentType]
    return WeightClient(remote, engine, timeline=Timeline(root / "events", "actor-0"), clock=lambda: now[0])


@pytest.fixture
def setup(tmp_path):
    now, store, engine = [0.0], AnnouncingStore(), LoadingEngine()
    with (
        contextlib.closing(open_writer(tmp_path / "w", token=TOKEN, lock_timeout_s=20.0)) as writer,
        serving(tmp_path / "w", token=TOKEN) as running,
        contextlib.closing(open_client(tmp_path, store, engine, now)) as client,
    ):
        yield Setup(tmp_path, running.url, writer, store, engine, client, now)
    assert list((tmp_path / "memory").iterdir()) == []


def test_follow_before_the_first_announcement_does_nothing(setup):
    assert not setup.follow()
    assert threading.get_ident() not in setup.store.threads  # a store may be slow: it is not asked by the event loop


@pytest.mark.heavy
def test_follow_serves_each_announced_version_once_and_whole(setup):
    for step in (0, 1, 2, 7):
        setup.publish(step)
        assert setup.follow()
        assert setup.engine.version == at(step)
        np.testing.assert_array_equal(setup.engine.loaded[-1], values(step))
        assert not setup.follow()
    assert setup.client.num_refused == 0
    assert set(setup.client.timings) == {"prefetch_s", "verify_s", "pause_s", "load_s"}


@pytest.mark.heavy
def test_two_actors_of_a_host_serve_the_same_from_one_download(setup):
    other_engine = LoadingEngine()
    with contextlib.closing(open_client(setup.root, setup.store, other_engine, [0.0])) as other:
        for step in (0, 1, 2):
            setup.publish(step)
            assert setup.follow()
            mine, setup.client, setup.engine = (setup.client, setup.engine), other, other_engine
            assert setup.follow()
            setup.client, setup.engine = mine
            np.testing.assert_array_equal(other_engine.loaded[-1], values(step))
        files = sorted(p.name for p in (setup.root / "memory").glob("*/copy-*") if "." not in p.name)
        assert files == ["copy-0", "copy-1"]


def test_forged_announcement_is_refused_and_what_is_served_unchanged(setup, caplog):
    good = setup.publish(1)
    assert setup.follow()
    setup.announce(sign(dataclasses.replace(good, version=at(5)), OTHER_TOKEN))
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused) == (at(1), 1)
    assert "not signed" in caplog.text
    setup.publish(2)  # the forged version was higher, but it was never believed
    assert setup.follow()
    assert setup.engine.version == at(2)


@pytest.mark.parametrize("signed", ["not", "with another token", "before"])
def test_announcement_of_sources_that_the_learner_did_not_name_is_refused_before_they_are_asked(setup, signed, caplog):
    """The store's administrator names a server of his own as a source | refused; no credential goes there"""
    setup.publish(1)
    assert setup.follow()
    manifest = publish(setup.writer, 2)
    theirs = ScriptedServer(values(2).tobytes())
    setup.announce(manifest)
    learners = setup.store.announcement
    forged = dataclasses.replace(learners, sources=(version_url(theirs.url, RUN, manifest.version), *learners.sources))
    if signed == "not":
        forged = dataclasses.replace(forged, hmac=None)
    elif signed == "with another token":
        forged = sign(forged, OTHER_TOKEN)
    setup.store.announcement = forged
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused, theirs.requests) == (at(1), 1, [])
    assert ("unsigned announcement" if signed == "not" else "the announcement of version 0:2 was not") in caplog.text
    theirs.close()
    setup.store.announcement = learners
    setup.now[0] = FIRST_RETRY_S
    assert setup.follow()
    assert setup.engine.version == at(2)


@pytest.mark.heavy
def test_old_manifest_replayed_is_refused_and_said_so(setup, caplog):
    """An old manifest, rightly signed, announced again | refused by whoever has fetched a newer one, which stays"""
    old = setup.publish(1)
    assert setup.follow()
    setup.publish(2)
    assert setup.follow()
    setup.announce(old)
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused) == (at(2), 1)
    assert "an old manifest was replayed" in caplog.text
    setup.publish(3)
    setup.now[0] = FIRST_RETRY_S
    assert setup.follow()


def test_version_superseded_while_it_is_fetched_is_no_refusal(setup):
    stale = setup.publish(0)
    publish(setup.writer, 1)
    setup.announce(stale)
    assert not setup.follow()
    assert setup.client.num_refused == 0
    setup.announce(publish(setup.writer, 2))
    assert setup.follow()
    assert setup.engine.version == at(2)


@pytest.mark.heavy
def test_server_that_is_down_is_no_refusal_and_asked_again_at_once(setup):
    manifest = publish(setup.writer, 0)
    url, setup.url = setup.url, DEAD
    setup.announce(manifest)
    assert not setup.follow()
    assert setup.client.num_refused == 0 and setup.client.is_blocked
    setup.url = url
    setup.announce(manifest)
    assert setup.follow()
    assert not setup.client.is_blocked


def silent_server() -> tuple[ScriptedServer, threading.Event]:
    """One that takes a request, and says nothing for ever; and what is set when it has one."""
    entered = threading.Event()

    def silent(request, connection):
        entered.set()
        connection.recv(1)

    return ScriptedServer(values(0).tobytes(), silent), entered


def test_server_that_a_restarted_learner_left_behind_is_left_for_the_one_that_it_announces(setup, monkeypatch):
    """A learner that is started again serves on another port; who had begun to ask the old one hears of it."""
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    server, entered = silent_server()
    real_url, setup.url = setup.url, server.url
    setup.publish(0)

    async def body() -> WeightManifest | None:
        task = asyncio.create_task(setup.client.prefetch())
        while not entered.is_set():
            await asyncio.sleep(0)
        setup.url = real_url
        setup.publish(1)
        return await task

    assert asyncio.run(body()) is None
    server.close()
    assert setup.client.num_refused == 0
    assert setup.follow()
    assert setup.engine.version == at(1)


def test_older_version_that_lay_in_reach_from_the_start_is_taken_when_nothing_arrives(setup, monkeypatch):
    """No other announcement comes, and the silent place never gives up by itself."""
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    server, _ = silent_server()
    setup.put(1)
    setup.announce_behind_a_wall(2, beside=1, url=server.url)
    assert not setup.follow()
    assert setup.follow()
    server.close()
    assert (setup.engine.version, setup.client.num_refused) == (at(1), 0)


def test_older_version_is_not_taken_before_the_announced_ones_source_is_asked(setup, monkeypatch):
    """Memory of a large version is allocated for seconds, or another process of the host downloads."""
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    looks, fetch, announced_by = threading.Semaphore(0), SnapshotFetcher.fetch, setup.store.announced

    def look():
        looks.release()
        return announced_by()

    def fetch_late(self, *args, **kwargs):
        for _ in range(9):
            assert looks.acquire(timeout=30)
        return fetch(self, *args, **kwargs)

    monkeypatch.setattr(setup.store, "announced", look)
    monkeypatch.setattr(SnapshotFetcher, "fetch", fetch_late)
    setup.put(1)
    setup.announce_behind_a_wall(2, beside=1, url=setup.url)
    assert setup.follow() and setup.engine.version == at(2)


def test_fetch_holds_no_event_loop_and_ends_when_it_is_cancelled(setup):
    """The place says nothing for ever; the actor is stopped in the middle of it."""
    manifest = publish(setup.writer, 0)
    server, entered = silent_server()
    real_url, setup.url = setup.url, server.url
    setup.announce(manifest)

    async def body() -> None:
        task = asyncio.create_task(setup.client.prefetch())
        while not entered.is_set():
            await asyncio.sleep(0)  # the loop goes on turning
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    server.close()
    setup.url = real_url
    setup.announce(manifest)
    assert setup.follow()
    assert setup.engine.version == Version(incarnation=0, step=0)


def test_learner_that_went_back_is_followed_to_its_higher_incarnation(setup):
    setup.publish(9)
    assert setup.follow()
    manifest = write_whole(setup.writer, at(3, incarnation=1), {"w": values(3)}, dtype="float32")
    setup.announce(manifest)
    assert setup.follow()
    assert setup.engine.version == at(3, incarnation=1)


@pytest.mark.heavy
def test_older_version_beside_an_announced_one_out_of_reach_is_served_then_a_newer_one_never_an_older_one(
    setup, caplog
):
    setup.put(1)
    publish(setup.writer, 2)
    setup.announce_behind_a_wall(3, beside=1)  # whose file has the same name
    assert not setup.follow() and setup.client.is_blocked  # the announced one is tried first
    assert setup.follow() and not setup.client.is_blocked
    assert setup.engine.version == at(1)
    np.testing.assert_array_equal(setup.engine.loaded[-1], values(1))
    assert not setup.follow()  # the announced one again
    setup.put(4)
    setup.announce_behind_a_wall(5, beside=4)
    assert setup.follow() and setup.engine.version == at(4)
    np.testing.assert_array_equal(setup.engine.loaded[-1], values(4))
    setup.announce_behind_a_wall(6, beside=1)
    assert not any(setup.follow() for _ in range(3))
    assert (setup.engine.version, setup.client.num_refused) == (at(4), 0)
    setup.announce_behind_a_wall(7, beside=1, url=setup.url)
    assert setup.follow() and setup.engine.version == at(7)
    assert "corrupt" not in caplog.text  # none was read for another one


@pytest.mark.heavy
def test_announced_version_is_taken_as_soon_as_it_is_in_reach_though_an_older_one_is_there(setup):
    setup.put(1)
    setup.announce_behind_a_wall(2, beside=1)
    assert [setup.follow(), setup.follow()] == [False, True]
    setup.put(3)
    setup.announce_behind_a_wall(4, beside=3, url=setup.url)
    assert setup.follow() and setup.engine.version == at(4)
    assert not setup.follow() and setup.engine.version == at(4)


@pytest.mark.heavy
def test_older_version_that_was_fetched_stays_until_the_engine_has_it(setup):
    """An actor that lets requests end before it swaps looks again and again what is announced."""
    setup.put(1)
    setup.announce_behind_a_wall(2, beside=1)

    async def body() -> bool:
        assert await setup.client.prefetch() is None
        manifest = await setup.client.prefetch()
        assert manifest is not None and manifest.version == at(1)
        assert [await setup.client.prefetch() for _ in range(3)] == [manifest] * 3
        return await setup.client.swap(manifest)

    assert asyncio.run(body())
    assert not setup.follow() and setup.engine.version == at(1)


@pytest.mark.heavy
@pytest.mark.parametrize("damage", ["replay", "unsigned", "another token", "not there", "data"])
def test_older_version_that_is_not_the_one_named_whole_and_signed_is_not_served(setup, damage, caplog):
    old, named = setup.put(1), setup.put(2)
    manifest = codec.decode(WeightManifest, (named / MANIFEST).read_bytes())
    match damage:
        case "replay":
            (named / MANIFEST).write_bytes((old / MANIFEST).read_bytes())
            complaint = "expected the announced version 0:2, got 0:1"
        case "unsigned":
            (named / MANIFEST).write_bytes(codec.encode(dataclasses.replace(manifest, hmac=None)))
            complaint = "unsigned manifest"
        case "another token":
            (named / MANIFEST).write_bytes(codec.encode(sign(manifest, OTHER_TOKEN)))
            complaint = "not signed"
        case "not there":
            (named / MANIFEST).unlink()
            complaint = "not in the bucket"
        case _:
            (named / manifest.shards[0].file.name).write_bytes(bytes(manifest.shards[0].file.num_bytes))
            complaint = "does not match its hash"
    setup.announce_behind_a_wall(3, beside=2)
    assert not any(setup.follow() for _ in range(3))
    assert setup.engine.version is None and complaint in caplog.text
    setup.publish(4)
    assert setup.follow() and setup.engine.version == at(4)


def test_sources_that_all_lack_the_version_are_asked_less_and_less_often_and_a_new_announcement_at_once(
    setup, monkeypatch
):
    asked: list[Version] = []
    fetch = SnapshotFetcher.fetch

    def counted(self, announcement, *args, **kwargs):
        asked.append(announcement.manifest.version)
        return fetch(self, announcement, *args, **kwargs)

    monkeypatch.setattr(SnapshotFetcher, "fetch", counted)
    stale = publish(setup.writer, 0)
    setup.put(1)
    publish(setup.writer, 2)
    setup.announce(stale)
    for now_s in (0.0, 0.9 * FIRST_ASK_S, FIRST_ASK_S, 2.9 * FIRST_ASK_S, 3 * FIRST_ASK_S):
        setup.now[0] = now_s
        assert not setup.follow()
        assert setup.client.is_blocked == (len(asked) == 3)
    assert asked == [at(0)] * 3
    setup.publish(3)
    assert setup.follow() and asked[3:] == [at(3)] and not setup.client.is_blocked
