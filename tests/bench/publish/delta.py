"""Deltas after one AdamW step on real gradients of a real model, in bfloat16.

    python -m tests.bench.publish.delta

The parameters before and after the step are published by the real writer and fetched by the real reader, once in full
and once as the delta. Times are wall-clock, on all cores, the best of a few; on a link the bytes come on top.
"""

import dataclasses
import json
import pathlib
import tempfile
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
from absl import app, logging

from bridge.rollout_types import Version
from bridge.snapshots.bucket import SnapshotBucket
from bridge.snapshots.delta import make_delta
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Announcement, WeightManifest
from tests.bench.publish import codecs, smollm2
from tests.bench.rig.report import Aim

RUN = "delta-bench"
LINK_BYTES_PER_S = 100e6
AIMS = {"delta_ratio_lr1e-6": 20.0, "delta_ratio_lr1e-5": 8.0}
_REPEATS = 3
_MEMORY = pathlib.Path("/dev/shm")


def measure() -> dict[str, Any]:
    """Values by their names in the publish bench; only `delta_unavailable`, and why, where the model can't be had."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        try:
            steps = smollm2.steps(smollm2.obtain(), pathlib.Path(folder))
        except smollm2.UnavailableError as e:
            logging.error("deltas are not measured: %s", e)
            return {**dict.fromkeys(AIMS), "delta_unavailable": str(e)}
        values: dict[str, Any] = {}
        for rate, (before, after) in steps.items():
            place = pathlib.Path(folder) / rate
            values |= {f"delta_{name}_lr{rate}": value for name, value in _measure_step(before, after, place).items()}
            before.unlink()
            after.unlink()
        return values


def table(values: dict[str, Any]) -> str:
    """The values as markdown."""
    if "delta_unavailable" in values:
        return f"Not measured: {values['delta_unavailable']}"
    lines = [
        "| lr | of the values changed | bytes in full | ratio | make | fetch and apply | the same in full "
        "| over 100 MB/s: delta | in full |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in smollm2.LEARNING_RATES:
        v = {name: values[f"delta_{name}_lr{rate}"] for name in _STEP_VALUES}
        delta_s = v["apply_s"] + v["bytes"] / LINK_BYTES_PER_S
        full_s = v["full_apply_s"] + v["full_bytes"] / LINK_BYTES_PER_S
        lines.append(
            f"| {rate} | {v['changed_share']:.2%} | {v['full_bytes']:,} | {v['ratio']:.1f} | {v['make_s']:.3f} s "
            f"| {v['apply_s']:.3f} s | {v['full_apply_s']:.3f} s | {delta_s:.2f} s | {full_s:.2f} s |"
        )
    lines += ["", "| codec, one core | " + " | ".join(f"lr {r}: ratio, make, apply" for r in smollm2.LEARNING_RATES)]
    lines[-1] += " |"
    lines.append("|---|" + "---|" * len(smollm2.LEARNING_RATES))
    by_rate = [values[f"delta_codecs_lr{rate}"] for rate in smollm2.LEARNING_RATES]
    for rows in zip(*by_rate, strict=True):
        cells = [f"{row['ratio']:.1f}, {row['make_s']:.3f} s, {row['apply_s']:.3f} s" for row in rows]
        lines.append(f"| {rows[0]['codec']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_STEP_VALUES = ("changed_share", "bytes", "full_bytes", "ratio", "make_s", "apply_s", "full_apply_s")


def _measure_step(before: pathlib.Path, after: pathlib.Path, place: pathlib.Path) -> dict[str, Any]:
    writer = SnapshotWriter(place / "snapshots", run=RUN, tokenizer_hash="t", full_every=2)
    bucket = SnapshotBucket((place / "bucket").as_uri(), place / "snapshots", run=RUN, keep=2)
    manifests: list[WeightManifest] = []
    sources: list[tuple[str, ...]] = []
    for step, file in enumerate((before, after)):
        manifests.append(writer.write(Version(incarnation=0, step=step), _load(file), dtype="bfloat16"))
        sources.append(bucket.put(manifests[-1]))
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
        "codecs": [dataclasses.asdict(row) for row in codecs.compare(old_data, new_data)],
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


def main(_: list[str]) -> None:
    values = measure()
    print(table(values))
    aims = {name: Aim(value=values[name], aim=aim).to_json() for name, aim in AIMS.items()}
    print(json.dumps({"bench": "publish_delta", "values": values, "aims": aims}))


if __name__ == "__main__":
    app.run(main)
