"""A batch of the leader's on the devices of several processes: bit for bit, in its place, and nothing else left."""

import pytest

from tests.learner import several_hosts

SPREAD = (
    several_hosts.CONNECT
    + """
import itertools
import jax
import numpy as np
from learner.distributed.sharding import batch_sharding, make_mesh, replicated
from learner.distributed.sharding import abstract, placed
from learner.distributed.sharding import BatchBroadcast

ROWS, TOKENS = 8, 12
SPECIAL = np.array(
    [0x80000000, 0, 0x7FC12345, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0xFFFFFFFF], np.uint32
)


def trees(seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (2, ROWS, TOKENS), np.uint32)
    bits[:, 0] = np.resize(SPECIAL, TOKENS)
    return {
        "int32": bits[0].view(np.int32),
        "float32": bits[1].view(np.float32),
        "float16": bits[0].astype(np.uint16).view(np.float16),
        "bool": bits[0] % 2 == 0,
        "int8": bits[1].astype(np.int8),
        "scalar": SPECIAL[seed % len(SPECIAL)].view(np.float32).reshape(()),
        "truth": np.asarray(seed % 2 == 1),
    }


def check(mesh):
    rows, whole = batch_sharding(mesh), replicated(mesh)
    shapes = jax.tree.map(abstract, trees(0))
    shapes = placed(shapes, jax.tree.map(lambda x: rows if x.ndim else whole, shapes))
    spread = BatchBroadcast(shapes, mesh)
    for seed in range(len(SPECIAL)):
        want = trees(seed)
        got = jax.block_until_ready(spread(want if hosts.is_leader else shapes))
        for name, x in got.items():
            assert (x.shape, x.dtype) == (shapes[name].shape, shapes[name].dtype)
            assert x.sharding.is_equivalent_to(shapes[name].sharding, x.ndim), (x.sharding, shapes[name].sharding)
            for shard in x.addressable_shards:
                part = np.asarray(want[name][shard.index])
                assert np.asarray(shard.data).tobytes() == part.tobytes(), (dict(mesh.shape), name, shard.index)
    assert spread._sum._cache_size() == spread._zeros._cache_size() == 1
    del got, x, shard
    assert jax.live_arrays() == [], "something beside what was handed out is left on the devices"


AXES = [
    dict(fsdp=8),
    dict(data=2, fsdp=2, expert=2),
    dict(data=4, sequence=2),
    dict(fsdp=2, sequence=2, tensor=2),
    dict(tensor=8),
]
devices = jax.devices()
mixed = [d for pair in zip(*(devices[i::4] for i in range(4))) for d in pair][::-1]
turned = devices[::2] + devices[1::2]
for axes, order in zip(AXES, itertools.cycle((None, turned))):
    check(make_mesh(**axes, devices=order))
check(make_mesh(data=2, fsdp=2, tensor=2, devices=mixed))
"""
)


@pytest.mark.heavy
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_batch_of_one_process_is_on_all_bit_for_bit_whatever_the_mesh_and_the_order_of_devices(count: int):
    several_hosts.run(SPREAD, count=count, devices_each=8 // count)


LARGE = (
    several_hosts.CONNECT.replace("peer_timeout_s=10", "peer_timeout_s=5")
    + """
import dataclasses
import jax
import numpy as np
from configs.sections import PackingConfig
from learner.commands import Accumulate, decode, encode
from learner.distributed.sharding import batch_sharding, make_mesh, replicated
from learner.update.packing import MicroBatch, empty_batch
from learner.distributed.sharding import abstract, placed
from learner.distributed.sharding import BatchBroadcast

packing = PackingConfig(rows=64, row_tokens=36864)
empty = empty_batch(packing)
assert sum(x.nbytes for x in jax.tree.leaves(empty)) > 1 << 26
mesh = make_mesh(fsdp=4)
shapes = jax.tree.map(abstract, empty)
where = jax.tree.map(lambda x: batch_sharding(mesh) if x.ndim else replicated(mesh), shapes)
spread = BatchBroadcast(placed(shapes, where), mesh)
channel = hosts.channel("decisions")
rows = np.arange(packing.rows * packing.row_tokens, dtype=np.int32).reshape(packing.rows, packing.row_tokens)
for i in range(3):
    told = None
    if hosts.is_leader:
        batch = dataclasses.replace(empty, tokens=rows + i, behavior_logprobs=(rows * -1e-6).astype(np.float32))
        micro = MicroBatch(
            batch=batch,
            ticket_ids=("a", "b"),
            sum_squared_lengths=1.0,
            ends_pack=i == 2,
            ends_update=False,
            ends_round=False,
        )
        told = encode(Accumulate(micro))
        assert len(told) < 1 << 12
    heard = decode(channel.broadcast(told, timeout_s=5), packing).micro
    assert heard.ends_pack == (i == 2)
    got = spread(batch if hosts.is_leader else heard.batch)
    for shard in got.tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, rows[shard.index] + i)
    for shard in got.behavior_logprobs.addressable_shards:
        np.testing.assert_array_equal(shard.data, (rows[shard.index] * -1e-6).astype(np.float32))
"""
)


@pytest.mark.heavy
def test_micro_batch_of_64_mib_comes_to_four_processes_with_a_short_bound_of_silence():
    several_hosts.run(LARGE, count=4)
