import asyncio
import contextlib
import dataclasses
import pathlib
import threading

import numpy as np
import pytest

from actor.weights import source
from actor.weights.client import FIRST_RETRY_S, WeightClient
from actor.weights.source import RemoteSource
from bridge.published import Announcement, WeightManifest
from bridge.snapshots.download import Patience
from bridge.snapshots.fetch import SnapshotFetcher
from bridge.snapshots.layout import place_of
from bridge.snapshots.shared import SharedCopy
from bridge.snapshots.signing import sign
from bridge.snapshots.writer import SnapshotWriter, map_tensors
from bridge.timeline import Timeline
from bridge.types import Version
from tests.actor.fakes import FakeEngine
from tests.bridge.snapshots.serving import (
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

TABLE = {"w": ("float32", (NUM_VALUES,))}
PATIENCE = Patience(silence_s=1e6, give_up_s=0.5, first_backoff_s=0.01, last_backoff_s=0.02)


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
        place = place_of(self.url, manifest.run, manifest.version)
        self.store.announcement = sign(Announcement(manifest=manifest, sources=(place,)), TOKEN)

    def follow(self) -> bool:
        async def body() -> bool:
            manifest = await self.client.prefetch()
            return manifest is not None and await self.client.swap(manifest)

        return asyncio.run(body())


def open_client(root: pathlib.Path, store: AnnouncingStore, engine: LoadingEngine, now: list[float]) -> WeightClient:
    fetcher = SnapshotFetcher(
        run=RUN, tokenizer_hash=TOKENIZER, expected=TABLE, token=TOKEN, patience=PATIENCE, lock_timeout_s=0.05
    )
    remote = RemoteSource(store, SharedCopy(root / "memory", run=RUN, fetcher=fetcher))  # pyright: ignore
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


def test_follow_serves_each_announced_version_once_and_whole(setup):
    for step in (0, 1, 2, 7):
        setup.publish(step)
        assert setup.follow()
        assert setup.engine.version == at(step)
        np.testing.assert_array_equal(setup.engine.loaded[-1], values(step))
        assert not setup.follow()
    assert setup.client.num_refused == 0
    assert set(setup.client.timings) == {"prefetch_s", "verify_s", "pause_s", "load_s"}


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


@pytest.mark.parametrize(
    ("forge", "complaint"),
    [
        (lambda m: dataclasses.replace(m, version=at(5), hmac=None), "unsigned manifest"),
        (lambda m: sign(dataclasses.replace(m, version=at(5)), OTHER_TOKEN), "not signed"),
        (lambda m: sign(dataclasses.replace(m, version=at(5), tokenizer_hash="u"), TOKEN), "tokenizer"),
        (lambda m: sign(dataclasses.replace(m, version=at(5), tensors=()), TOKEN), "tensors"),
    ],
)
def test_forged_announcement_is_refused_and_what_is_served_unchanged(setup, forge, complaint, caplog):
    good = setup.publish(1)
    assert setup.follow()
    setup.announce(forge(good))
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused) == (at(1), 1)
    assert complaint in caplog.text
    setup.publish(2)  # the forged version was higher, but it was never believed
    assert setup.follow()
    assert setup.engine.version == at(2)


@pytest.mark.parametrize("signed", ["not", "with another token", "before"])
def test_announcement_of_sources_that_the_learner_did_not_name_is_refused_before_they_are_asked(setup, signed, caplog):
    """A server of the store's administrator, for weights of the learner's: it is shown no credential."""
    setup.publish(1)
    assert setup.follow()
    manifest = publish(setup.writer, 2)
    theirs = ScriptedServer(values(2).tobytes())
    setup.announce(manifest)
    learners = setup.store.announcement
    forged = dataclasses.replace(learners, sources=(place_of(theirs.url, RUN, manifest.version), *learners.sources))
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


def test_old_manifest_replayed_is_refused_and_said_so(setup, caplog):
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


def test_server_that_is_down_is_no_refusal_and_asked_again_at_once(setup):
    manifest = publish(setup.writer, 0)
    url, setup.url = setup.url, "http://127.0.0.1:1"
    setup.announce(manifest)
    assert not setup.follow()
    assert setup.client.num_refused == 0 and setup.client.is_stuck
    setup.url = url
    setup.announce(manifest)
    assert setup.follow()
    assert not setup.client.is_stuck


def test_server_that_a_restarted_learner_left_behind_is_left_for_the_one_that_it_announces(setup, monkeypatch):
    """A learner that is started again serves on another port; who had begun to ask the old one hears of it."""
    monkeypatch.setattr(source, "LOOK_S", 0.0)
    entered = threading.Event()

    def silent(request, connection):
        entered.set()
        connection.recv(1)

    server = ScriptedServer(values(0).tobytes(), silent)
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


def test_fetch_holds_no_event_loop_and_ends_when_it_is_cancelled(setup):
    """The place says nothing for ever; the actor is stopped in the middle of it."""
    manifest = publish(setup.writer, 0)
    entered = threading.Event()

    def silent(request, connection):
        entered.set()
        connection.recv(1)

    server = ScriptedServer(values(0).tobytes(), silent)
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
    manifest = setup.writer.write(at(3, incarnation=1), {"w": values(3)}, dtype="float32")
    setup.announce(manifest)
    assert setup.follow()
    assert setup.engine.version == at(3, incarnation=1)
