"""A learner whose bucket is always behind, and an actor that reaches the bucket alone: real HTTP, a real folder."""

import asyncio
import contextlib
import functools
import pathlib
import queue
import threading
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actor.weights import source
from actor.weights.client import WeightClient
from actor.weights.source import RemoteSource
from bridge.param_names import flatten
from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import sign, version_url
from bridge.snapshots.verified_copy import map_tensors
from bridge.timeline import Timeline
from bridge.weight_types import Announcement
from configs.sections import PublishConfig
from learner.publish.destinations import Destination
from learner.publish.publisher import Publisher
from tests.actor.fakes import FakeEngine
from tests.bridge.snapshots.served import RUN, TOKEN, TOKENIZER, open_writer, serving
from tests.bridge.snapshots.whole import put
from tests.integration.support.proxy import Proxy, proxy
from tests.learner.streams import MODEL, fresh_params
from tests.param_tensors import iter_tensors

DEADLINE_S = 60.0
PATIENCE = RetryPolicy(silence_s=0.2, give_up_s=1e6, first_backoff_s=0.01, last_backoff_s=0.02)


class SlowBucket(SnapshotBucket):
    """Has a version in hand, and puts its manifest there when it is told to."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.in_hand, self.gates = queue.SimpleQueue[int](), queue.SimpleQueue[None]()

    def _put_piece(self, version, copy) -> None:
        self.in_hand.put(version.step)
        self.gates.get(timeout=DEADLINE_S)
        super()._put_piece(version, copy)


class Rig:
    """A publisher, what it announced last, and an actor behind a proxy that can be stalled."""

    def __init__(self, root: pathlib.Path, parts: contextlib.ExitStack) -> None:
        self.told, self.params = threading.Condition(), fresh_params()
        self.announcement: Announcement | None = None
        self.writer = parts.enter_context(contextlib.closing(open_writer(root / "w", token=TOKEN, lock_timeout_s=20.0)))
        running = parts.enter_context(serving(root / "w", token=TOKEN))
        target = urllib.parse.urlsplit(running.url)
        self.way: Proxy = parts.enter_context(proxy((str(target.hostname), int(target.port or 0))))
        self.bucket = SlowBucket((root / "bucket").as_uri(), root / "w", run=RUN, keep=2)
        way = f"http://{self.way.address[0]}:{self.way.address[1]}"
        server = Destination(name="server", put=lambda m: [version_url(way, RUN, m.version)])
        bucket = Destination(name="bucket", put=functools.partial(put, self.bucket), is_slow=True)
        self.publisher = parts.enter_context(
            contextlib.closing(
                Publisher(
                    self.writer,
                    MODEL.param_names,
                    PublishConfig(when="every"),
                    incarnation=0,
                    dtype="float32",
                    destinations=[server, bucket],
                    announce=self._announce,
                )
            )
        )
        self.engine = FakeEngine()
        fetcher = SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER, token=TOKEN, patience=PATIENCE)
        shared = SharedDownload(root / "memory", run=RUN, fetcher=fetcher)
        remote = RemoteSource(self, shared)  # pyright: ignore[reportArgumentType]  # all that it asks of a store
        timeline = Timeline(root / "events", "actor-0")
        self.client = parts.enter_context(contextlib.closing(WeightClient(remote, self.engine, timeline=timeline)))
        self.served: list[int] = []
        self.tensors: dict[str, np.ndarray] = {}

    def announced(self) -> Announcement | None:
        return self.announcement

    def _announce(self, announcement: Announcement) -> None:
        with self.told:
            self.announcement = sign(announcement, TOKEN)
            self.told.notify_all()

    def publish(self, step: int) -> dict[str, np.ndarray]:
        """The learner's version; returns what it holds."""
        params = jax.tree.map(lambda x: jnp.asarray(x + step), self.params)
        self.publisher.publish(params, step=step)
        self.publisher.wait_until_published()
        return dict(iter_tensors(MODEL.param_names, {path: np.array(x) for path, x in flatten(params).items()}))

    def land(self, step: int) -> None:
        """The bucket gets the version that is in hand, though a newer one is announced; and that is told."""
        self.bucket.gates.put(None)
        with self.told:
            assert self.told.wait_for(
                lambda: (
                    self.announcement is not None
                    and any(s.startswith("file:") and s.endswith(f"/0:{step}") for s in self.announcement.sources)
                ),
                DEADLINE_S,
            )

    async def follow(self, step: int) -> None:
        """Looks until a version is served; remembers all that were."""
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.version != Version(incarnation=0, step=step):
                manifest = await self.client.prefetch()
                if manifest is not None:
                    self.tensors = {n: np.array(x) for n, x in map_tensors(self.client._file, manifest).items()}  # pyright: ignore
                    assert await self.client.swap(manifest)
                    self.served.append(manifest.version.step)
                await asyncio.sleep(0.01)


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.heavy
def test_actor_that_reaches_the_bucket_alone_serves_what_lands_there_however_far_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "LOOK_S", 0.1)
    with contextlib.ExitStack() as parts:
        rig = Rig(tmp_path, parts)
        rig.way.stall()
        wanted = {0: rig.publish(0)}
        for step in range(1, 4):  # a version comes out before the one before is in the bucket, every time
            assert rig.bucket.in_hand.get(timeout=DEADLINE_S) == step - 1
            wanted[step] = rig.publish(step)
            following = threading.Thread(target=asyncio.run, args=(rig.follow(step - 1),))
            following.start()
            rig.land(step - 1)
            following.join()
            assert rig.served == list(range(step))
            assert_same(rig.tensors, wanted[step - 1])
        rig.way.flow()
        wanted[4] = rig.publish(4)
        asyncio.run(rig.follow(4))
        assert rig.served == [0, 1, 2, 4] and rig.client.num_refused == 0
        assert_same(rig.tensors, wanted[4])
        for _ in range(2):
            rig.bucket.gates.put(None)
