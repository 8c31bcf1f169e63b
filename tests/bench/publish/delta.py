"""Deltas after one AdamW step on real gradients of a real model, in bfloat16.

    python -m tests.bench.publish --parts=delta

The parameters before and after the step are published by the real writer and fetched by the real reader, once in full
and once as the delta. Times are wall-clock, on all cores, the best of a few; on a link the bytes come on top.
"""

import pathlib
import tempfile
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
from absl import logging

from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.delta import make_delta
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Announcement, WeightManifest
from tests.bench.harness.parts import print_measured
from tests.bench.publish import smollm2
from tests.bridge.snapshots.whole import put, write_whole

RUN = "delta-bench"
_REPEATS = 3
_MEMORY = pathlib.Path("/dev/shm")


def measure() -> dict[str, Any]:
    """Values by their names in the publish bench; only `delta_unavailable`, and why, where the model can't be had."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        try:
            steps = smollm2.steps(pathlib.Path(folder))
        except smollm2.UnavailableError as e:
            logging.error("deltas are not measured: %s", e)
            return {"delta_unavailable": str(e)}
        values: dict[str, Any] = {}
        for rate, (before, after) in steps.items():
            place = pathlib.Path(folder) / rate
            values |= {f"delta_{name}_lr{rate}": value for name, value in _measure_step(before, after, place).items()}
            before.unlink()
            after.unlink()
        return values


def _measure_step(before: pathlib.Path, after: pathlib.Path, place: pathlib.Path) -> dict[str, Any]:
    writer = SnapshotWriter(place / "snapshots", run=RUN, tokenizer_hash="t", full_every=2)
    bucket = SnapshotBucket((place / "bucket").as_uri(), place / "snapshots", run=RUN, keep=2)
    manifests: list[WeightManifest] = []
    sources: list[tuple[str, ...]] = []
    for step, file in enumerate((before, after)):
        manifests.append(write_whole(writer, Version(incarnation=0, step=step), _load(file), dtype="bfloat16"))
        sources.append(put(bucket, manifests[-1]))
    old, new = manifests
    delta = new.shards[0].delta
    assert delta is not None, "a step's delta is worth it"
    old_data, new_data = (
        np.memmap(place / "snapshots" / m.shards[0].file.name, np.uint8, "r", shape=(m.num_bytes,)) for m in manifests
    )
    make_s = min(_timed(lambda: make_delta(old, old_data, new, new_data, name="delta-1")) for _ in range(_REPEATS))
    announcements = [Announcement(manifest=m, sources=s) for m, s in zip(manifests, sources, strict=True)]
    apply_s, full_apply_s = _time_fetches(announcements[0], announcements[1], place)
    values = {
        "ratio": new.num_bytes / delta.num_bytes,
        "bytes": delta.num_bytes,
        "full_bytes": new.num_bytes,
        "changed_share": float(np.mean(old_data.view(np.uint16) != new_data.view(np.uint16))),
        "make_s": make_s,
        "apply_s": apply_s,
        "full_apply_s": full_apply_s,
    }
    writer.remove()
    return values


def _time_fetches(old: Announcement, new: Announcement, place: pathlib.Path) -> tuple[float, float]:
    """Seconds to fetch and verify the newer version from a folder in memory: as a delta, and in full."""
    fetcher, stop = SnapshotFetcher(run=RUN, tokenizer_hash="t"), threading.Event()
    base, into = place / "copy-0", place / "copy-1"
    fetcher.fetch(old, base, stop=stop)
    by_delta, in_full = [], []
    for _ in range(_REPEATS):
        for times, before in ((by_delta, base), (in_full, None)):
            into.with_name(f"{into.name}.manifest").unlink(missing_ok=True)  # as if it held nothing, but warm
            times.append(_timed(lambda before=before: fetcher.fetch(new, into, stop=stop, base=before)))
    assert fetcher.num_deltas == _REPEATS and fetcher.num_failed_deltas == 0
    fetcher.close()
    return min(by_delta), min(in_full)


def _load(file: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(file) as arrays:
        return {name: arrays[name].view(ml_dtypes.bfloat16) for name in arrays.files}


def _timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    print_measured(measure)
