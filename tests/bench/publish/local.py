"""On one machine: export, write, hash, publish, mirror, attach and load, beside a memcpy of the published bytes.

    python -m tests.bench.publish.local SIZE NUM_CORES

In a process that may use only so many cores. Every target is warm; memcpy is one thread's, into the same slot.
"""

import os
import pathlib
import sys
import tempfile
from typing import Any

from tests.bench.harness.parts import print_measured
from tests.param_tensors import iter_tensors

ROUNDS = 9


def measure(size_name: str, num_cores: int) -> dict[str, Any]:
    """Seconds and ratios by name."""
    import jax
    import ml_dtypes
    import numpy as np

    from bridge.param_names import flatten
    from bridge.rollout_types import Version
    from bridge.snapshots.shared_memory import cast_all_into
    from bridge.snapshots.snapshot_format import hashed, latest
    from bridge.snapshots.snapshot_writer import SnapshotWriter
    from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
    from configs.sections import PublishConfig
    from learner.publish.publisher import Publisher
    from tests.bench.publish.sizes import SIZES, make_params
    from tests.bench.publish.timing import in_turns, medians, speed_over
    from tests.bridge.snapshots.whole import WholeDraft

    size = SIZES[size_name]
    params = make_params(size)
    keys: dict[str, Any] = {"run": "bench", "tokenizer_hash": "t"}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        snapshots, copy = pathlib.Path(folder) / "weights", pathlib.Path(folder) / "copy"
        writer = SnapshotWriter(snapshots, **keys)
        publisher = Publisher(writer, size.names, PublishConfig(), incarnation=0, dtype="bfloat16")
        versions = iter(range(1000))

        def publish() -> None:
            publisher.publish(params, step=next(versions))
            publisher.finish()

        publishing = in_turns({"publish": publish}, rounds=3)
        manifest = latest(snapshots)
        assert manifest is not None
        mirror = VerifiedCopy(snapshots, copy, **keys)
        fetching = in_turns({"mirror": lambda: mirror.fetch(manifest)}, rounds=3)
        tensors = map_tensors(copy, manifest)
        engine = {name: np.array(x) for name, x in tensors.items()}

        def load() -> None:
            for name, x in map_tensors(copy, manifest).items():
                np.copyto(engine[name], x)

        del tensors
        loading = in_turns({"attach": lambda: map_tensors(copy, manifest), "load": load}, rounds=ROUNDS)
        engine.clear()
        mirror.close()
        copy.unlink()
        sources = dict(iter_tensors(size.names, {path: np.asarray(x) for path, x in flatten(params).items()}))
        on_device = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype("bfloat16"), tree))
        entries = [(name, "bfloat16", x.shape) for name, x in sources.items()]
        with WholeDraft(writer, Version(incarnation=1, step=0), entries) as draft:
            pairs = [(draft.buffer(name), x) for name, x in sources.items()]
            served = [(target, np.asarray(x, dtype=ml_dtypes.bfloat16)) for target, x in pairs]
            whole = np.ones(manifest.shards[0].file.num_bytes, np.uint8)
            bits = [
                (draft.buffer(t.name).view(np.uint8).reshape(-1), whole[t.offset_bytes : t.offset_bytes + t.num_bytes])
                for t in manifest.tensors
            ]

            def memcpy() -> None:
                for target, x in bits:
                    np.copyto(target, x)

            def numpy_cast() -> None:
                for target, x in pairs:
                    np.copyto(target, x.astype(ml_dtypes.bfloat16))

            seconds = in_turns(
                {
                    "memcpy": memcpy,
                    "write": lambda: cast_all_into(served),
                    "hash": lambda: hashed(manifest.shards[0].file, whole),
                },
                rounds=ROUNDS,
            )
            for_comparison = in_turns(
                {
                    "memcpy": memcpy,
                    "naive": numpy_cast,
                    "device_cast": lambda: jax.block_until_ready(on_device(params)),
                },
                rounds=2,
            )
            naive = speed_over(for_comparison, "naive", than="memcpy")
            del for_comparison["memcpy"]
            del bits, pairs, draft
        publisher.close()
    seconds |= publishing | fetching | loading | for_comparison
    return medians(seconds) | {
        "num_parameters": size.num_parameters,
        "num_bytes": manifest.shards[0].file.num_bytes,
        "publish_over_memcpy": speed_over(seconds, "write", than="memcpy"),
        "naive_over_memcpy": naive,
    }


if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    print_measured(measure, sys.argv[1], int(sys.argv[2]))
