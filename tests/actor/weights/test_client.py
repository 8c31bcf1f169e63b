import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest

from actor.weights.client import FIRST_RETRY_S, WeightClient
from actor.weights.source import LocalSource
from bridge import timeline
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import UnreachableError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import is_verified
from bridge.timeline import Timeline
from bridge.weight_types import WeightManifest
from tests.actor.fakes import FakeEngine
from tests.bridge.snapshots.whole import write_whole

TABLE = {"a": ("float32", (3, 5)), "b": ("float32", (7,))}


def version(step: int, incarnation: int = 0) -> Version:
    return Version(incarnation=incarnation, step=step)


@dataclasses.dataclass
class Setup:
    root: pathlib.Path
    writer: SnapshotWriter
    engine: FakeEngine
    client: WeightClient
    now: list[float]

    def publish(self, step: int, incarnation: int = 0):
        tensors = {name: np.full(shape, step, np.float32) for name, (_, shape) in TABLE.items()}
        return write_whole(self.writer, version(step, incarnation), tensors, dtype="float32")

    def damage(self, manifest) -> None:
        path = self.root / "snapshots" / manifest.shards[0].file.name
        data = bytearray(path.read_bytes())
        data[manifest.tensors[0].offset_bytes] ^= 1
        path.write_bytes(data)

    def follow(self) -> bool:
        """One look at the announced version; True if another one is served after it."""

        async def body() -> bool:
            manifest = await self.client.prefetch()
            return manifest is not None and await self.client.swap(manifest)

        return asyncio.run(body())

    def events(self, name: str) -> list[dict]:
        return [e["args"] for e in timeline.read(self.root / "events") if e["name"] == name]


@pytest.fixture
def setup(tmp_path):
    return make_setup(tmp_path)


def make_setup(root: pathlib.Path, **expected) -> Setup:
    now = [0.0]
    engine = FakeEngine()
    client = WeightClient(
        LocalSource(
            root / "snapshots",
            root / "copy" / "weights",
            **({"run": "r", "tokenizer_hash": "t", "expected": TABLE} | expected),
        ),
        engine,
        timeline=Timeline(root / "events", "actor-0"),
        clock=lambda: now[0],
    )
    return Setup(root, SnapshotWriter(root / "snapshots", run="r", tokenizer_hash="t"), engine, client, now)


def test_follow_without_a_snapshot_does_nothing(setup):
    assert not setup.follow()
    assert setup.engine.version is None


def test_follow_serves_each_announced_version_once(setup):
    for step in (0, 1, 5):
        manifest = setup.publish(step)
        assert setup.follow()
        assert setup.engine.version == version(step)
        assert is_verified(setup.root / "copy" / "weights") == manifest
        assert not setup.follow()
    assert setup.engine.swapped == [version(0), version(1), version(5)]
    assert set(setup.client.timings) == {"prefetch_s", "verify_s", "pause_s", "load_s"}
    assert [e["version"] for e in setup.events("pause")] == ["0:0", "0:1", "0:5"]
    assert [e["version"] for e in setup.events("prefetch")] == ["0:0", "0:1", "0:5"]


def test_follow_goes_back_only_to_a_higher_incarnation(setup):
    setup.publish(9)
    setup.engine.version = version(12)
    assert not setup.follow()
    setup.publish(3, incarnation=1)
    assert setup.follow()
    assert setup.engine.version == version(3, incarnation=1)


def test_corrupt_snapshot_is_refused_counted_and_retried_later(setup):
    setup.publish(0)
    assert setup.follow()
    manifest = setup.publish(1)
    setup.damage(manifest)
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused) == (version(0), 1)
    assert is_verified(setup.root / "copy" / "weights") is None  # what was copied passes for no version
    (event,) = setup.events("refused")
    assert event["version"] == "0:1" and event["served"] == "0:0" and "corrupt" in event["reason"]
    assert not setup.follow()
    assert setup.client.num_refused == 1  # not before its time
    setup.damage(manifest)  # flips the bit back
    setup.now[0] = FIRST_RETRY_S
    assert setup.follow()
    assert setup.engine.version == version(1)


def test_snapshot_refused_again_and_again_is_retried_less_often_until_a_newer_one(setup):
    setup.damage(setup.publish(0))
    attempts = []
    for _ in range(400):
        before = setup.client.num_refused
        assert not setup.follow()
        if setup.client.num_refused > before:
            attempts.append(setup.now[0])
        setup.now[0] += 0.25
    gaps = np.diff(attempts)
    assert np.all(np.diff(gaps) >= 0) and gaps[0] == FIRST_RETRY_S and gaps[-1] == 30.0
    assert setup.client.is_blocked
    setup.publish(1)
    assert setup.follow()  # at once
    assert not setup.client.is_blocked


@pytest.mark.parametrize(
    "expected",
    [
        {"run": "another"},
        {"tokenizer_hash": "another"},
        {"expected": TABLE | {"c": ("float32", (1,))}},
    ],
)
def test_snapshot_of_another_run_tokenizer_or_model_is_refused(tmp_path, expected):
    setup = make_setup(tmp_path, **expected)
    setup.publish(0)
    assert not setup.follow()
    assert setup.engine.swapped == []
    assert setup.client.num_refused == 1


def test_snapshot_the_engine_refuses_leaves_the_old_one(setup):
    setup.publish(0)
    assert setup.follow()
    setup.engine.refuse = {version(1)}
    setup.publish(1)
    assert not setup.follow()
    assert (setup.engine.version, setup.client.num_refused) == (version(0), 1)


def test_damaged_manifest_is_refused_and_not_read_in_a_busy_loop(setup):
    setup.publish(0)
    (setup.root / "snapshots" / "manifest").write_bytes(b"junk")
    for _ in range(5):
        assert not setup.follow()
    assert setup.client.num_refused == 1
    setup.now[0] = 100.0
    assert not setup.follow()
    assert setup.client.num_refused == 2


def test_announcement_of_the_served_version_after_unreadable_ones_ends_the_block(setup):
    setup.publish(0)
    assert setup.follow()
    path = setup.root / "snapshots" / "manifest"
    readable = path.read_bytes()
    path.write_bytes(b"junk")
    while not setup.client.is_blocked:
        setup.now[0] += 100.0
        assert not setup.follow()
    path.write_bytes(readable)
    setup.now[0] += 100.0
    assert not setup.follow()  # it is served already
    assert not setup.client.is_blocked


def test_version_out_of_reach_is_no_refusal_and_served_once_the_network_is_back(setup, monkeypatch):
    setup.publish(0)
    assert setup.follow()
    setup.publish(1)
    real = LocalSource.fetch

    async def cut_off(source: LocalSource, manifest: WeightManifest) -> pathlib.Path:
        raise UnreachableError("nobody answers")

    monkeypatch.setattr(LocalSource, "fetch", cut_off)
    for _ in range(20):  # far beyond what makes a refused version hopeless
        assert not setup.follow()
    setup.client.raise_if_refused_too_long()
    assert setup.client.is_blocked and setup.client.num_refused == 0
    monkeypatch.setattr(LocalSource, "fetch", real)
    assert setup.follow()  # at once: the clock stands still
    assert setup.engine.version == version(1) and not setup.client.is_blocked
