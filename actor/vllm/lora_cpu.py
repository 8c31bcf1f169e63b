"""Low-rank adapters on a CPU: one matrix product per adapter, where vLLM's own backend has one per token.

vLLM 0.32 copies a whole adapter for every token of a step: 19.5 MB at rank 16 on all layers of SmolLM2-135M (costs:
`tests/bench/results/cpu_adapters.md`). In a step with adapters, it also gives tokens without one the product of the
last adapter slot. Its backends for accelerators do neither. Only linear layers have adapters here (lora.targets).
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

TokensByPlace = Sequence[tuple[int, torch.Tensor | None]]
"""Adapter slots in the stacks, each with the indices [n] of its tokens in a step; None for all tokens."""


class GroupedCpuLora(PunicaWrapperCPU):
    """vLLM's LoRA backend for a CPU, for steps whose requests use several adapters.

    The token indices are a Python list computed before each step: vLLM compiles no model with adapters on a CPU.
    """

    _used: TokensByPlace = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Records which token uses which adapter; vLLM calls it before each step."""
        super().update_metadata(*args, **kwargs)
        self._used = tokens_by_place(self.token_lora_indices)

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        shrink(y, x, w_t_all, scale, self._used)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        expand(y[:, y_offset : y_offset + y_slice_size], x, w_t_all, self._used, adds=add_inputs)


def tokens_by_place(places: torch.Tensor) -> TokensByPlace:
    """Returns the adapter slots in use, ascending, with their tokens; `places` [tokens] has -1 without an adapter."""
    used = places.unique().tolist()
    if len(used) == 1:
        return [(used[0], None)] if used[0] >= 0 else []
    return [(place, (places == place).nonzero().squeeze(1)) for place in used if place >= 0]


def shrink(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, scale: float, used: TokensByPlace) -> None:
    """Sets `y = scale * x A^T` with each token's A, in y's dtype; tokens without an adapter keep their y.

    y: [tokens, rank], x: [tokens, inputs], stack of the A: [slots, 1, rank, inputs].
    """
    for place, tokens in used:
        a = stack[place, 0].to(y.dtype)
        if tokens is None:
            torch.mul(x.to(y.dtype) @ a.T, scale, out=y)
        else:
            y[tokens] = x[tokens].to(y.dtype) @ a.T * scale


def expand(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, used: TokensByPlace, *, adds: bool) -> None:
    """Adds `x B^T` with each token's B to y, in y's dtype; tokens without an adapter keep their y.

    y: [tokens, outputs], x: [tokens, rank], stack of the B: [slots, 1, outputs, rank]. Without `adds` it replaces y.
    """
    for place, tokens in used:
        b = stack[place, 0].to(y.dtype)
        if tokens is None and adds:
            y.addmm_(x.to(y.dtype), b.T)
        else:
            rows = slice(None) if tokens is None else tokens
            product = x[rows].to(y.dtype) @ b.T
            y[rows] = y[rows] + product if adds else product
