"""Hosts that publish together: a version goes out with all pieces, or not at all, and the next one does."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.object_store import open_source
from bridge.param_names import flatten
from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket, place_of_run, read_bucket_manifest, stored_versions
from bridge.snapshots.snapshot_format import SnapshotError, latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import Announcement, WeightManifest
from configs.sections import PublishConfig
from learner.distributed.channel import ProcessLostError
from learner.publish import publisher as publishing
from learner.publish.destinations import BucketDestination, Destination
from learner.publish.publisher import Publisher
from learner.publish.weight_export import ExportPlan, share_of
from tests.bridge.snapshots.written import fetch
from tests.learner.publish.published import DEADLINE_S, wanted_of
from tests.learner.publish.thread_hosts import ThreadHosts
from tests.learner.streams import MODEL, fresh_params

COUNT = 3
KEYS: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}


class Writer(SnapshotWriter):
    """Fails as often as it is told, and waits where it is told to."""

    num_failures = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def begin(self, *args, **kwargs):
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        if self.num_failures:
            self.num_failures -= 1
            raise SnapshotError("no room")
        return super().begin(*args, **kwargs)


class Learner:
    """A publisher a host, over one model that all hold whole: each writes a third of the rows."""

    def __init__(self, folder: Path, *, when_late: Any = "wait", has_bucket: bool = False, **given: Any) -> None:
        self.folder, self.told = folder / "weights", []
        config = PublishConfig(when="every", when_late=when_late)
        self.hosts = ThreadHosts.of(COUNT)
        self.writers = [Writer(self.folder, host=i, num_hosts=COUNT, **KEYS) for i in range(COUNT)]
        self.publishers = []
        for host, writer in zip(self.hosts, self.writers, strict=True):
            announce = self.told.append if host.is_leader else None
            options = given | {"hosts": host, "announce": announce, "incarnation": 2, "dtype": "float32"}
            server = Destination(name="server", put=lambda m, i=host.index: self.serve(i, m))
            bucket = Destination(name="bucket", put=lambda m: (f"s3://bucket/{m.version}",), is_slow=True)
            destinations = [server, bucket] if has_bucket and host.is_leader else [server]
            made = Publisher(writer, MODEL.param_names, config, destinations=destinations, **options)
            made._share = one_of_three(host.index)
            self.publishers.append(made)

        self.down: set[int] = set()
        """Hosts whose server refuses versions."""

    def serve(self, host: int, manifest: WeightManifest) -> tuple[str, ...]:
        return () if host in self.down else (f"https://host-{host}/{manifest.version}",)

    def each(self, call) -> None:
        """The same call at every host, at once."""
        errors: list[BaseException] = []

        def run(published: Publisher) -> None:
            try:
                call(published)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=run, args=(p,)) for p in self.publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        if errors:
            raise errors[0]

    def publish(self, step: int, **given: Any) -> None:
        params = params_of(step)
        self.each(lambda published: published.publish(params, step=step, **given))

    def finish(self) -> None:
        self.each(lambda published: published.finish())

    def steps(self) -> list[int]:
        return [a.manifest.version.step for a in self.told]

    def close(self) -> None:
        for writer in self.writers:
            writer.gate.set()
        self.each(lambda published: published.close())


def params_of(step: int):
    return jax.tree.map(lambda x: jnp.asarray(x + step), fresh_params())


class Device:
    """One of three that stand for this process's only one, each on a host of its own."""

    def __init__(self, id_: int, real: Any) -> None:
        self.id, self.real = id_, real


class Copied:
    """A leaf as three hosts hold it, whole: its shape, and where it lies."""

    def __init__(self, leaf: Any) -> None:
        (self.device,) = leaf.devices()
        self.shape, self.dtype, self.sharding = leaf.shape, leaf.dtype, self

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
        return {Device(i, self.device): tuple(slice(None) for _ in shape) for i in range(COUNT)}


def one_of_three(index: int) -> ExportPlan:
    """What each host writes: a third of the rows."""
    leaves: Any = {path: Copied(leaf) for path, leaf in flatten(params_of(0)).items()}
    share = share_of(leaves, MODEL.param_names, index, host_of=lambda device: device.id)
    sources = tuple(dataclasses.replace(s, device=s.device.real) for s in share.sources)
    return dataclasses.replace(share, sources=sources)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(publishing, "RETRY_INTERVAL_S", 0.0)


@pytest.fixture
def learner(tmp_path, quick):
    made = Learner(tmp_path)
    yield made
    made.close()


def holds(learner: Learner, step: int) -> bool:
    manifest = latest(learner.folder)
    assert manifest is not None
    fetch(learner.folder, manifest, learner.folder.with_name("copy"), **KEYS)
    got, want = map_tensors(learner.folder.with_name("copy"), manifest), wanted_of(params_of(step))
    return got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)


def test_version_goes_out_with_all_pieces_and_where_each_lies(learner):
    for step in (1, 2):
        learner.publish(step)
        learner.finish()
        assert holds(learner, step)
    assert learner.steps() == [1, 2]
    told: Announcement = learner.told[-1]
    assert (told.sources, told.host_sources) == ((), tuple((f"https://host-{i}/2:2",) for i in range(COUNT)))
    sizes = [piece.file.num_bytes for piece in told.manifest.shards]
    assert max(sizes) < 0.5 * told.manifest.num_bytes
    assert {p.announced_version for p in learner.publishers} == {Version(incarnation=2, step=2)}


def test_version_that_a_host_does_not_serve_is_told_once_it_is_in_the_bucket(tmp_path, quick):
    learner = Learner(tmp_path, has_bucket=True)
    learner.down = {1}
    learner.publish(1)
    learner.finish()
    assert [a.sources for a in learner.told] == [("s3://bucket/2:1",)]
    learner.close()


def test_host_that_fails_once_holds_all_up_and_is_counted_and_then_it_goes_out(learner):
    learner.publish(1)
    learner.finish()
    learner.writers[1].num_failures = 2
    learner.publish(2)
    learner.finish()
    assert learner.steps() == [1, 2] and holds(learner, 2)
    assert [p.metrics()["publish/destination_failures"] for p in learner.publishers] == [2] * COUNT


def test_version_that_fails_is_not_announced_where_a_newer_one_waits(tmp_path, quick):
    learner = Learner(tmp_path, when_late="replace")
    learner.publish(1)
    learner.finish()
    for writer in learner.writers:
        writer.reached.clear()
        writer.gate.clear()
    learner.publish(2)
    assert all(writer.reached.wait(DEADLINE_S) for writer in learner.writers)
    learner.writers[2].num_failures = 1
    learner.publish(3)  # waits
    learner.publish(4)  # takes its place, at every host
    for writer in learner.writers:
        writer.gate.set()
    learner.finish()
    assert learner.steps() == [1, 4] and holds(learner, 4)
    assert [p.metrics()["publish/replaced"] for p in learner.publishers] == [1] * COUNT
    learner.close()


def test_host_that_fails_again_and_again_ends_all_and_the_version_before_stays(learner):
    learner.publish(1)
    learner.finish()
    learner.writers[1].num_failures = 99
    learner.publish(2)
    for published in learner.publishers:
        with pytest.raises(SnapshotError, match="5 consecutive versions could not be written: host 1: no room"):
            published.finish()
    assert learner.steps() == [1] and holds(learner, 1)
    learner.told.clear()


def test_bucket_has_a_version_when_all_hosts_have_put_their_pieces(learner, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    buckets = [SnapshotBucket(url, learner.folder, run="r", keep=2, host=i, pause=lambda _: None) for i in range(COUNT)]
    parts = [BucketDestination(b, learner.folder, h) for b, h in zip(buckets, learner.hosts, strict=True)]
    learner.publish(1)
    learner.finish()
    first = learner.told[-1].manifest
    assert parts[0].put(first) == (f"{url}/v1/r/2:1",)
    run_place = open_source(place_of_run(url, "r"))
    assert read_bucket_manifest(run_place, first.version) == first
    learner.publish(2)
    learner.finish()
    second = learner.told[-1].manifest
    (learner.folder / "slot-1.host-2").rename(tmp_path / "away")
    with pytest.raises(SnapshotError, match="superseded"):
        parts[0].put(second)
    assert not stored_versions(run_place)[second.version].is_whole
    (tmp_path / "away").rename(learner.folder / "slot-1.host-2")
    parts[0].put(second)
    assert stored_versions(run_place)[second.version].names == {
        "manifest",
        *(p.file.name for p in second.shards),
    }


def test_follower_whose_leader_says_nothing_fails_the_wait_for_its_version(tmp_path):
    follower = ThreadHosts.of(2)[1]
    writer = Writer(tmp_path / "weights", host=1, num_hosts=2, **KEYS)
    options: dict[str, Any] = {"incarnation": 2, "dtype": "float32", "hosts": follower, "hosts_wait_s": 0.01}
    made = Publisher(writer, MODEL.param_names, PublishConfig(when="every"), **options)
    made._share = one_of_three(1)
    made.publish(params_of(1), step=1)
    with pytest.raises(ProcessLostError):
        made.wait_until_published()
    made.close()
