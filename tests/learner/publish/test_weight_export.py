"""Which host writes what: hosts are groups of eight devices, whose files must make up the one of a single host."""

import json

import pytest

from tests.learner import eight_devices

_CODE = """
import contextlib, dataclasses, json, pathlib, tempfile, jax, numpy as np
from bridge.param_names import flatten
from bridge.snapshots.shared_memory import cast_all_into
from bridge.snapshots.verified_copy import VerifiedCopy
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.rollout_types import Version
from learner.distributed.sharding import make_mesh, param_shardings
from learner.model.decoder import abstract_params
from learner.publish.weight_export import Export
from learner.publish.weight_export import share_of
from tests.learner.streams import MODEL

MODELS = {
    "qwen3": dataclasses.replace(MODEL, vocab_size=24),
    "moe": dataclasses.replace(
        MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_token=2, moe_intermediate_size=8
    ),
}
KEYS = {"run": "r", "tokenizer_hash": "t"}
VERSION = Version(incarnation=0, step=1)
SPLITS = [
    ("qwen3", dict(fsdp=8), 2, "near"),
    ("qwen3", dict(data=2, fsdp=4), 4, "near"),
    ("qwen3", dict(data=8), 4, "near"),
    ("qwen3", dict(fsdp=4, tensor=2), 4, "near"),
    ("qwen3", dict(tensor=2, sequence=4), 4, "far"),
    ("moe", dict(expert=2, fsdp=4), 4, "near"),
    ("moe", dict(expert=2, fsdp=2, data=2), 2, "far"),
]

def write(writer, export):
    with writer.begin(VERSION, export.entries, export.share.blocks) as draft:
        cast_all_into(export.pairs(draft))
        return draft.seal()

def publish(folder, params, names, num_hosts, host_of, dtype):
    writers = [SnapshotWriter(folder, host=i, num_hosts=num_hosts, **KEYS) for i in range(num_hosts)]
    leaves, parts, sizes = flatten(params), [], []
    for i, writer in enumerate(writers):
        share = share_of(leaves, names, i, host_of=host_of)
        assert all(host_of(source.device) == i for source in share.sources)
        parts.append(write(writer, Export(params, dtype, names, share=share)))
    manifest = writers[0].join(parts)
    for writer in writers:
        writer.announce(manifest)
    with contextlib.closing(VerifiedCopy(folder, folder / "copy", **KEYS)) as mirror:
        mirror.fetch(manifest)
    return manifest, (folder / "copy").read_bytes()[: manifest.num_bytes]

for model, axes, num_hosts, lie in SPLITS:
    architecture = MODELS[model]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(0, 1, x.shape).astype(np.float32), abstract_params(architecture))
    names = architecture.param_names
    split = jax.device_put(params, param_shardings(params, make_mesh(**axes)))
    host_of = (lambda d: d.id % num_hosts) if lie == "far" else (lambda d: d.id * num_hosts // 8)
    for dtype in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            manifest, got = publish(root / "many", split, names, num_hosts, host_of, dtype)
            _, alone = publish(root / "split", split, names, 1, lambda d: 0, dtype)
            _, want = publish(root / "one", jax.device_put(params, jax.devices()[0]), names, 1, lambda d: 0, dtype)
            sizes = [piece.file.num_bytes for piece in manifest.shards]
            print(json.dumps([model, axes, num_hosts, lie, dtype, got == want, alone == want, max(sizes) / len(want)]))
"""


@pytest.mark.heavy
def test_pieces_of_the_hosts_of_any_mesh_make_up_what_one_host_writes():
    rows = [json.loads(line) for line in eight_devices.run(_CODE).splitlines()]
    assert len(rows) == 14
    for *setting, num_hosts, lie, dtype, is_same, is_same_alone, largest in rows:
        assert is_same and is_same_alone, (setting, num_hosts, lie, dtype)
        # No host writes much more than its part: gaps and what has too few rows are little even in a tiny model.
        assert largest < 1.5 / num_hosts, (setting, num_hosts, lie, dtype, largest)
