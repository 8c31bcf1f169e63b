"""A learner of several hosts, as the bridge sees it: a writer each, and versions that all of them write."""

import pathlib

import numpy as np

from bridge.snapshots.shard_map import matrix_shape
from bridge.snapshots.snapshot_draft import SnapshotDraft
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Block, WeightManifest
from tests.bridge.snapshots.served import CHUNK_BYTES, RUN, TOKEN, TOKENIZER, at
from tests.bridge.snapshots.whole import WholeDraft

ENTRIES = [
    ("embed", "bfloat16", (100, 48)),
    *((f"layers.{i}.q", "bfloat16", (36, 250)) for i in range(3)),
    ("norm", "bfloat16", (5,)),
    *((f"layers.{i}.down", "float32", (64, 36)) for i in range(3)),
]
"""Tensors whose ends are not all at multiples of 64 bytes: there are zeros between some."""


def model(step: int) -> dict[str, np.ndarray]:
    """A step moves a few values, and none of the last half of each tensor."""
    made = {}
    for number, (name, _, shape) in enumerate(ENTRIES):
        value = np.random.default_rng(number).normal(0, 1, shape).astype(np.float32).reshape(-1)
        for s in range(step):
            value[np.random.default_rng(s).integers(0, value.size // 2 + 1, value.size // 50 + 1)] *= 1.5
        made[name] = value.reshape(shape)
    return made


def blocks_of(host: int, num_hosts: int) -> list[Block]:
    """The embedding by columns, the other matrices by rows, the norm with the last host."""
    blocks = []
    for first, num in ((0, 1), (1, 3), (4, 1), (5, 3)):
        rows, cols = matrix_shape(ENTRIES[first][2])
        r0, r1, c0, c1 = 0, rows, 0, cols
        if first == 0:
            c0, c1 = host * cols // num_hosts, (host + 1) * cols // num_hosts
        elif rows > 1:
            r0, r1 = host * rows // num_hosts, (host + 1) * rows // num_hosts
        elif host != num_hosts - 1:
            continue
        blocks.append(
            Block(first_tensor=first, num_tensors=num, first_row=r0, num_rows=r1 - r0, first_col=c0, num_cols=c1 - c0)
        )
    return blocks


class HostWriters:
    """`num_hosts` writers, each in a folder of its own, as on machines of their own, or all in one."""

    def __init__(self, folders: list[pathlib.Path], **options) -> None:
        """A folder for each host."""
        self.folders = folders
        keys = {"run": RUN, "tokenizer_hash": TOKENIZER, "token": TOKEN, "chunk_bytes": CHUNK_BYTES} | options
        keys["clock"] = lambda: 12.5
        self.writers = [
            SnapshotWriter(folder, host=i, num_hosts=len(folders), **keys) for i, folder in enumerate(folders)
        ]

    def write(self, host: int, step: int, incarnation: int = 0) -> SnapshotDraft:
        """A host's draft of a version, all written."""
        blocks, tensors = blocks_of(host, len(self.writers)), model(step)
        draft = self.writers[host].begin(at(step, incarnation), ENTRIES, blocks)
        for number, b in enumerate(blocks):
            for i, target in enumerate(draft.block(number)):
                name, _, shape = ENTRIES[b.first_tensor + i]
                matrix = tensors[name].reshape(matrix_shape(shape))
                rows, cols = slice(b.first_row, b.first_row + b.num_rows), slice(b.first_col, b.first_col + b.num_cols)
                target[:] = matrix[rows, cols]
        return draft

    def publish(self, step: int, incarnation: int = 0) -> WeightManifest:
        """A version by all of them, announced in every folder."""
        parts = [self.write(host, step, incarnation).seal() for host in range(len(self.writers))]
        manifest = self.writers[0].join(parts)
        for writer in self.writers:
            writer.announce(manifest)
        return manifest

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def alone(folder: pathlib.Path, step: int) -> bytes:
    """The file of the same version by a single host."""
    with_one = HostWriters([folder])
    draft = WholeDraft(with_one.writers[0], at(step), ENTRIES)
    for name, value in model(step).items():
        draft.buffer(name)[...] = value
    manifest = draft.announce()
    with_one.close()
    return (folder / manifest.shards[0].file.name).read_bytes()[: manifest.num_bytes]
