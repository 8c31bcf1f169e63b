"""What a CPU multiplies by adapters, against each token's own product in float64."""

from typing import Any

import pytest

from tests.support.lazy import torch

pytestmark = pytest.mark.heavy  # vLLM's import

TOKENS, INPUTS, RANK, OUTPUTS, PLACES = 7, 12, 4, (6, 2), 3
MIXES = {
    "all under one": [1] * TOKENS,
    "two in turns": [0, 2, 0, 2, 2, 0, 0],
    "some without one": [2, -1, 0, -1, 2, 1, 0],
    "none": [-1] * TOKENS,
}


def stacks(generator: Any) -> tuple[list[Any], list[Any]]:
    """A and B of a layer of two slices, as vLLM stacks them."""
    a = [torch.randn(PLACES, 1, RANK, INPUTS, generator=generator) for _ in OUTPUTS]
    b = [torch.randn(PLACES, 1, n, RANK, generator=generator) for n in OUTPUTS]
    return a, b


def wanted(y: Any, x: Any, a, b, scale: float, mix: list[int]) -> Any:
    """Token by token."""
    rows = []
    for t, place in enumerate(mix):
        own = [b[i][place, 0].double() @ (a[i][place, 0].double() @ x[t].double()) for i in range(len(OUTPUTS))]
        rows.append(y[t].double() + (scale * torch.cat(own) if place >= 0 else 0))
    return torch.stack(rows)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_adds_to_each_token_what_its_adapter_says(mix, dtype):
    from vllm.lora.layers import LoRAMapping

    from actor.vllm.lora_cpu import GroupedCpuLora

    generator = torch.Generator().manual_seed(0)
    a, b = ([w.to(getattr(torch, dtype)) for w in stack] for stack in stacks(generator))
    x = torch.randn(TOKENS, INPUTS, generator=generator).to(getattr(torch, dtype))
    y = torch.randn(TOKENS, sum(OUTPUTS), generator=generator).to(x.dtype)
    ids = tuple(0 if place < 0 else 10 + place for place in mix)
    wrapper = GroupedCpuLora(max_num_batched_tokens=64, max_batches=8, device="cpu")
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [10, 11, 12], PLACES, 100)
    want = wanted(y, x, a, b, 0.5, mix)
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 0.5, OUTPUTS)
    bound: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(y.double(), want, **bound)


def test_the_next_step_has_other_tokens():
    from vllm.lora.layers import LoRAMapping

    from actor.vllm.lora_cpu import GroupedCpuLora

    a, b = stacks(torch.Generator().manual_seed(0))
    wrapper = GroupedCpuLora(max_num_batched_tokens=64, max_batches=8, device="cpu")
    for ids in ((10, 11), (12,), (0, 12, 10)):
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [10, 11, 12], PLACES, 100)
        x, y = torch.ones(len(ids), INPUTS), torch.zeros(len(ids), sum(OUTPUTS))
        want = wanted(y, x, a, b, 1.0, [one - 10 if one else -1 for one in ids])
        wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, OUTPUTS)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_parts_of_a_sharded_adapter_are_asked_for_one_by_one():
    from vllm.lora.layers import LoRAMapping

    from actor.vllm.lora_cpu import GroupedCpuLora

    a, b = stacks(torch.Generator().manual_seed(0))
    mix, ids = [1, -1, 2], (11, 0, 12)
    wrapper = GroupedCpuLora(max_num_batched_tokens=64, max_batches=8, device="cpu")
    wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [10, 11, 12], PLACES, 100)
    x, y = torch.ones(3, INPUTS), torch.zeros(3, sum(OUTPUTS))
    buffer = torch.zeros(2, 3, RANK)
    wrapper.add_shrink(buffer, x, tuple(a), 0.5)
    for i, offset in enumerate((0, OUTPUTS[0])):
        wrapper.add_expand(y, buffer[i : i + 1], (b[i],), (OUTPUTS[i],), offset_start=offset)
    torch.testing.assert_close(y.double(), wanted(torch.zeros_like(y), x, a, b, 0.5, mix), rtol=1e-5, atol=1e-5)


def test_rows_that_fill_a_step_up_disturb_no_token():
    from vllm.lora.layers import LoRAMapping

    from actor.vllm.lora_cpu import GroupedCpuLora

    a, b = stacks(torch.Generator().manual_seed(0))
    wrapper = GroupedCpuLora(max_num_batched_tokens=64, max_batches=8, device="cpu")
    for ids in ((11, 11), (11, 12)):
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [10, 11, 12], PLACES, 100)
        x, y = torch.ones(4, INPUTS), torch.zeros(4, sum(OUTPUTS))
        want = wanted(y[:2], x[:2], a, b, 1.0, [one - 10 for one in ids])
        wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, OUTPUTS)
        torch.testing.assert_close(y[:2].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [None, [1]], ids=["all", "some"])
def test_expand_that_does_not_add_replaces(tokens):
    from actor.vllm.lora_cpu import expand

    tokens = None if tokens is None else torch.tensor(tokens)
    b = torch.randn(1, 1, 3, RANK)
    y = torch.full((2, 3), 7.0)
    expand(y, torch.ones(2, RANK), b, [(0, tokens)], adds=False)
    torch.testing.assert_close(y[1], b[0, 0].sum(1))
    torch.testing.assert_close(y[0], b[0, 0].sum(1) if tokens is None else torch.full((3,), 7.0))


def test_vllm_takes_it_where_the_engine_is_on_a_cpu():
    from vllm.lora.punica_wrapper import get_punica_wrapper
    from vllm.platforms import current_platform

    import actor.vllm.worker  # noqa: F401  # as each of its processes does
    from actor.vllm.lora_cpu import GroupedCpuLora

    if not current_platform.is_cpu():
        pytest.skip("no CPU backend")
    assert type(get_punica_wrapper(64, 8, "cpu")) is GroupedCpuLora
