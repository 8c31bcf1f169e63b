"""A reader that is slower than versions come: newer ones are announced, and the wait for it over, while it reads."""

import contextlib
import threading

import numpy as np
import pytest

from bridge.snapshots.remote import download
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import SupersededError, is_chunk
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import WeightManifest
from tests.bridge.snapshots.served import RUN, TOKEN, TOKENIZER, Clock, announced, at, serving
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support.processes import wait_until

CHUNK_BYTES, NUM_CHUNKS = 2**20, 40
"""In one range, several times what the kernel buffers: while a chunk is looked at, the server is still sending."""
ONE_RANGE = RetryPolicy(num_ranges=1, range_bytes=2**30, give_up_s=0.5, first_backoff_s=0.01, last_backoff_s=0.02)
NEWER_AT = (1, 4, 7)
"""Chunks."""


def values(step: int) -> np.ndarray:
    return np.full(NUM_CHUNKS * CHUNK_BYTES // 4, step, np.float32)


@pytest.mark.heavy
@pytest.mark.parametrize("slow_reader_grace_s", [0.0, 1000.0])
def test_reader_slower_than_versions_come_gets_whole_ones_where_one_is_kept(tmp_path, monkeypatch, slow_reader_grace_s):
    monkeypatch.setattr("bridge.snapshots.snapshot_writer._SPARE_AFTER_S", 0.0)
    clock, into, got, seen = Clock(), tmp_path / "copy", [], []
    with contextlib.ExitStack() as open_:
        writer = SnapshotWriter(
            tmp_path / "w",
            run=RUN,
            tokenizer_hash=TOKENIZER,
            token=TOKEN,
            lock_timeout_s=20.0,
            has_spare=slow_reader_grace_s > 0,
            chunk_bytes=CHUNK_BYTES,
        )
        open_.callback(writer.close)
        fetcher = SnapshotFetcher(run=RUN, tokenizer_hash=TOKENIZER, token=TOKEN, patience=ONE_RANGE)
        open_.callback(fetcher.close)
        running = open_.enter_context(
            serving(tmp_path / "w", token=TOKEN, clock=clock, slow_reader_grace_s=slow_reader_grace_s)
        )
        slots = running.server.slots
        sweep = slots.sweep
        monkeypatch.setattr(slots, "sweep", lambda: (sweep(), seen.append(1)))

        def publish(step: int) -> WeightManifest:
            return write_whole(writer, at(step), {"w": values(step)}, dtype="float32")

        def look() -> None:
            before = len(seen)
            wait_until(lambda: len(seen) >= before + 2, "the server looks")

        def arrived(chunk, file, index) -> bool:
            if index in NEWER_AT:
                manifests.append(publish(len(manifests) + 1))
                look()
                clock.now_s += 10.0
                look()
            return is_chunk(chunk, file, index)

        manifests = [publish(1)]
        monkeypatch.setattr(download, "is_chunk", arrived)
        for _ in range(2):
            manifest = manifests[-1]
            with contextlib.suppress(SupersededError):
                fetcher.fetch(announced(manifest, running.url), into, stop=threading.Event())
                step = manifest.version.step
                np.testing.assert_array_equal(map_tensors(into, manifest)["w"], values(step))
                got.append((step, manifests[-1].version.step))
            clock.now_s += 10.0
            look()
    # What it read, and what was announced by the time it had it.
    assert got == ([(1, 4), (4, 7)] if slow_reader_grace_s else [])
