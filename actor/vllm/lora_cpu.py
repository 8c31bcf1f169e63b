"""Low-rank adapters on a CPU: one matrix product for each adapter, where vLLM's own backend has one for each token.

vLLM 0.32 picks an adapter's matrices for every token of a step, as a copy each: the whole adapter a token, 19.5 MB at
rank 16 on all layers of SmolLM2-135M (`tests/bench/results/cpu_adapters.md` has what it costs). A token without an
adapter, in a step in which others have one, gets the product of the last place. Its backends for accelerators do
neither.

Of linear layers alone, which are all that has adapters here (lora.targets).
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

TokensByPlace = Sequence[tuple[int, torch.Tensor | None]]
"""Adapters' places in the stacks, each with the tokens [n] of a step that run under it; None for all of them."""


class GroupedCpuLora(PunicaWrapperCPU):
    """What vLLM asks of a CPU in a step whose requests run under several adapters.

    Which do is known before a step as a Python list: vLLM compiles no model with adapters on a CPU.
    """

    _used: TokensByPlace = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Told before each step which token runs under which adapter."""
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
    """The places that are in use, in order.

    Args:
      places: [tokens], each one's, or -1 without an adapter.
    """
    used = places.unique().tolist()
    if len(used) == 1:
        return [(used[0], None)] if used[0] >= 0 else []
    return [(place, (places == place).nonzero().squeeze(1)) for place in used if place >= 0]


def shrink(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, scale: float, used: TokensByPlace) -> None:
    """Sets `y = scale * x A^T` with each token's A, in y's dtype; a token without an adapter keeps its y.

    Args:
      y: [tokens, rank].
      x: [tokens, inputs].
      stack: [places, 1, rank, inputs].
      scale: of the product.
      used: by which token.
    """
    for place, tokens in used:
        a = stack[place, 0].to(y.dtype)
        if tokens is None:
            torch.mul(x.to(y.dtype) @ a.T, scale, out=y)
        else:
            y[tokens] = x[tokens].to(y.dtype) @ a.T * scale


def expand(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, used: TokensByPlace, *, adds: bool) -> None:
    """Adds `x B^T` with each token's B to y, in y's dtype; a token without an adapter keeps its y.

    Args:
      y: [tokens, outputs].
      x: [tokens, rank].
      stack: [places, 1, outputs, rank].
      used: by which token.
      adds: whether the product is added to y, or replaces it.
    """
    for place, tokens in used:
        b = stack[place, 0].to(y.dtype)
        if tokens is None and adds:
            y.addmm_(x.to(y.dtype), b.T)
        else:
            rows = slice(None) if tokens is None else tokens
            product = x[rows].to(y.dtype) @ b.T
            y[rows] = y[rows] + product if adds else product
