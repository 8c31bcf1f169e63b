"""Which part of a tensor each process of a tensor-parallel engine holds: together they hold all of it, in order."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lazy import torch

pytestmark = pytest.mark.heavy  # vLLM's import


def layer_of(kind: str, **fields: Any) -> Any:
    """A layer of vLLM's class that knows its place and nothing else; making a whole one needs the other processes."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    cls = getattr(linear, kind, None) or getattr(vocab_parallel_embedding, kind)
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer


@functools.cache
def matrix() -> Any:
    return torch.arange(48.0).reshape(8, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_of_column_parallel_layers_are_the_whole_in_order(size):
    from actor.vllm.verify_weights import local_columns, local_part

    layers = [layer_of("MergedColumnParallelLinear", tp_rank=rank, tp_size=size) for rank in range(size)]
    for number in (0, 1):
        assert torch.equal(torch.cat([local_part(layer, number, matrix()) for layer in layers]), matrix())
    assert {local_columns(layer, 6) for layer in layers} == {(0, 6)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_of_row_parallel_layers_are_the_whole_in_order(size):
    from actor.vllm.verify_weights import local_columns, local_part

    layers = [layer_of("RowParallelLinear", tp_rank=rank, tp_size=size) for rank in range(size)]
    held = [local_columns(layer, 6) for layer in layers]
    assert [start + i for start, count in held for i in range(count)] == list(range(6))
    assert all(torch.equal(local_part(layer, 0, matrix()), matrix()) for layer in layers)


def test_keys_of_fewer_heads_than_processes_are_held_by_several():
    from actor.vllm.verify_weights import local_part

    # Eight query heads of one row, two key heads of four, over four processes: each key head is held twice.
    layers = [layer_of("QKVParallelLinear", tp_rank=rank, tp_size=4, num_kv_head_replicas=2) for rank in range(4)]
    assert [local_part(layer, 0, matrix())[:, 0].tolist() for layer in layers] == [[0, 6], [12, 18], [24, 30], [36, 42]]
    keys = [local_part(layer, 1, matrix()) for layer in layers]
    assert torch.equal(keys[0], matrix()[:4]) and torch.equal(keys[1], matrix()[:4])
    assert torch.equal(keys[2], matrix()[4:]) and torch.equal(keys[3], matrix()[4:])


def test_vocabulary_is_held_by_ranges_without_the_padding():
    from actor.vllm.verify_weights import local_part

    ranges = [(0, 5), (5, 8)]
    layers = [
        layer_of(
            "VocabParallelEmbedding",
            shard_indices=SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end),
        )
        for start, end in ranges
    ]
    assert torch.equal(torch.cat([local_part(layer, 0, matrix()) for layer in layers]), matrix())


def test_matrix_that_can_not_be_split_evenly_is_refused():
    from actor.vllm.verify_weights import expert_rows

    layer = SimpleNamespace(moe_config=SimpleNamespace(tp_rank=1, tp_size=2))
    assert expert_rows(layer, 8) == slice(4, 8)
    with pytest.raises(RuntimeError, match="7 rows cannot be split evenly over 2 processes"):
        expert_rows(layer, 7)


EXPERTS, SIZE = 8, 6


def swap_experts(parts: Any) -> None:
    parts["up"][[2, 5]] = parts["up"][[5, 2]]


def transpose_expert(parts: Any) -> None:
    parts["gate"][3] = parts["gate"][3].T.clone()


def miss_expert(parts: Any) -> None:
    parts["down"][EXPERTS - 1] += 1


@pytest.mark.parametrize("damage", [None, swap_experts, transpose_expert, miss_expert])
def test_experts_are_compared_at_once_and_a_wrong_one_is_found(monkeypatch, damage):
    from actor.vllm.verify_weights import verify_served

    parts = {p: torch.rand(EXPERTS, SIZE, SIZE, dtype=torch.float64) for p in ("gate", "up", "down")}
    snapshot = {f"mlp.{i}.{p}_proj.weight": parts[p][i].clone() for p in parts for i in range(EXPERTS)}
    if damage is not None:
        damage(parts)
    layer: Any = torch.nn.Module()
    model = torch.nn.ModuleDict({"mlp": layer})
    mine = slice(SIZE // 2, SIZE)  # the second of two processes
    layer.w13_weight = torch.cat([parts["gate"][:, mine], parts["up"][:, mine]], dim=1)
    layer.w2_weight = parts["down"][:, :, mine]
    layer.moe_config = SimpleNamespace(tp_rank=1, tp_size=2)
    layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="CPU"))
    equal, compared = torch.equal, []
    monkeypatch.setattr("torch.equal", lambda got, want: compared.append(got.shape) or equal(got, want))
    if damage is None:
        verify_served(model, snapshot, seed=0)
        assert len(compared) == 3
    else:
        with pytest.raises(RuntimeError, match="not served as it is in the snapshot"):
            verify_served(model, snapshot, seed=0)
