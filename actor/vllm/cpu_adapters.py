"""Low-rank adapters on a CPU: one matrix product for each adapter, where vLLM's own backend has one for each token.

vLLM 0.32 picks an adapter's matrices for every token of a step, as a copy each: with rank 16 on all layers of
SmolLM2-135M 19.5 MB a token, four fifths of a step's time (`tests/bench/results/lora.md`). It also takes a request
without an adapter for one of the last. Its backends for accelerators do neither.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Used = Sequence[tuple[int, torch.Tensor | None]]
"""Adapters' places in the stacks, each with the tokens [n] of a step that run under it; None for all of them."""


class ByAdapter(PunicaWrapperCPU):
    """What vLLM asks of a CPU in a step whose requests run under several adapters."""

    _used: Used = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Told before each step which token runs under which adapter."""
        super().update_metadata(*args, **kwargs)
        self._used = used_places(self.token_lora_indices)

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


def used_places(indices: torch.Tensor) -> Used:
    """The places that are in use.

    Args:
      indices: [tokens], each one's place, or -1 without an adapter.
    """
    places = indices.unique().tolist()
    if len(places) == 1:
        return [(places[0], None)] if places[0] >= 0 else []
    return [(place, (indices == place).nonzero().squeeze(1)) for place in places if place >= 0]


def shrink(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, scale: float, used: Used) -> None:
    """Sets `y = scale * x A^T`, each token's A; a token without an adapter keeps its y.

    Args:
      y: [tokens, rank].
      x: [tokens, inputs].
      stack: [places, 1, rank, inputs].
      scale: of the product.
      used: `used_places`.
    """
    for place, tokens in used:
        a = stack[place, 0]
        if tokens is None:
            torch.mul(x.to(a.dtype) @ a.T, scale, out=y)
        else:
            y[tokens] = (x[tokens].to(a.dtype) @ a.T * scale).to(y.dtype)


def expand(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, used: Used, *, adds: bool) -> None:
    """Adds to y `x B^T`, each token's B, or sets it.

    Args:
      y: [tokens, outputs].
      x: [tokens, rank].
      stack: [places, 1, outputs, rank].
      used: `used_places`.
      adds: not `y = `, but `y += `.
    """
    for place, tokens in used:
        b = stack[place, 0]
        if tokens is None and adds and y.dtype == b.dtype:
            y.addmm_(x.to(b.dtype), b.T)
        else:
            rows = slice(None) if tokens is None else tokens
            product = (x[rows].to(b.dtype) @ b.T).to(y.dtype)
            y[rows] = y[rows] + product if adds else product
