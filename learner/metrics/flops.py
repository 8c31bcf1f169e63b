"""Model FLOPs of a step and peak FLOP/s of chips, the two sides of MFU. Imports no jax.

Convention (Chowdhery et al., 2022, "PaLM", appendix B, with the differences named):

- A matmul of n multiply-adds is 2 n FLOPs. Backward costs twice the forward, so a matmul parameter costs 6 FLOPs
  per token. Norms, rotations, softmax, the optimizer and embedding lookups are not counted.
- A mixture of experts counts only the active experts of a token, and the router.
- Attention is causal within a sequence: a token attends to half of its sequence on average, so a sequence of L
  tokens costs 2 L^2 H hd forward FLOPs per layer (q k^T and p v, L^2 / 2 pairs each). PaLM and many tables count
  all L^2 pairs, which inflates the FLOPs of long sequences by up to a factor of two. The smaller number of pairs of a
  sliding window is not subtracted.
- The head is counted for scored tokens only, because only their logits enter the loss. To compare with
  pre-training, which scores every token, pass `num_tokens` as `num_scored_tokens`.
- Recomputation by rematerialization is not counted. `launch.tools.compile_tpu` counts it (HFU).
"""

import dataclasses

from configs.sections.model import LoraConfig
from learner.model.architecture import Architecture


def matmul_params(config: Architecture) -> int:
    """Returns the layer parameters that multiply each token; active experts only, no embedding, no head."""
    c = config
    attention = 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads)
    if c.num_experts:
        mlp = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_token + c.hidden_size * c.num_experts
    else:
        mlp = 3 * c.hidden_size * c.intermediate_size
    return c.num_layers * (attention + mlp)


def forward_flops(
    config: Architecture, *, num_tokens: float, num_scored_tokens: float, sum_squared_lengths: float
) -> float:
    """Returns the FLOPs of a forward pass, which is the cost of scoring; arguments as `model_flops`."""
    return sum(_forward_parts(config, num_tokens, num_scored_tokens, sum_squared_lengths))


def model_flops(
    config: Architecture,
    *,
    num_tokens: float,
    num_scored_tokens: float,
    sum_squared_lengths: float,
    num_adapter_params: int = 0,
) -> float:
    """Returns the FLOPs of a training step: 3 x (2 N T + 2 D V T_scored + 2 L H hd sum_i n_i^2).

    With M adapter parameters the matrices are frozen and need no gradients: 2 x (2 N T + 2 D V T_scored) + 3 x (2 M T +
    2 L H hd sum_i n_i^2). (The gradient of the first layer's input is counted although it is not needed.)

    Args:
      config: the model.
      num_tokens: T, prompt and response tokens without padding.
      num_scored_tokens: tokens that enter the loss, for which the head is counted.
      sum_squared_lengths: sum over sequences of squared length, prompt plus response.
      num_adapter_params: parameters of low-rank adapters if only they train; 0 if all parameters train.
    """
    layers, attention, head = _forward_parts(config, num_tokens, num_scored_tokens, sum_squared_lengths)
    if not num_adapter_params:
        return 3 * (layers + attention + head)
    return 2 * (layers + head) + 3 * (attention + 2.0 * num_adapter_params * num_tokens)


def adapter_params(config: Architecture, lora: LoraConfig) -> int:
    """Returns the number of adapter parameters: rank x (in + out) of each adapted matrix; 0 without adapters."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    of_module = {
        "q_proj": c.hidden_size + queries,
        "k_proj": c.hidden_size + keys,
        "v_proj": c.hidden_size + keys,
        "o_proj": queries + c.hidden_size,
    } | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), c.hidden_size + c.intermediate_size)
    return c.num_layers * lora.rank * sum(of_module[module] for module in lora.modules)


def _forward_parts(
    config: Architecture, num_tokens: float, num_scored_tokens: float, sum_squared_lengths: float
) -> tuple[float, float, float]:
    """Returns the FLOPs of (projections and MLPs, attention, head)."""
    return (
        2.0 * matmul_params(config) * num_tokens,
        2.0 * config.num_layers * config.num_heads * config.head_dim * sum_squared_lengths,
        2.0 * config.hidden_size * config.vocab_size * num_scored_tokens,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuChip:
    """Peak rate, usable memory and topology of a TPU chip."""

    flops_per_s: float
    """Dense bf16 FLOP/s."""
    hbm_bytes: int
    """Memory for programs, in bytes: capacity minus the runtime's share, from XLA's out-of-memory message."""
    torus_dims: int
    """Dimensions of the interconnect."""


# Sources: cloud.google.com/tpu/docs/v5e, /v5p, /v6e (bf16 peak).
TPU_CHIPS: dict[str, TpuChip] = {
    "v5e": TpuChip(flops_per_s=197e12, hbm_bytes=int(15.75 * 2**30), torus_dims=2),
    "v5p": TpuChip(flops_per_s=459e12, hbm_bytes=int(95.74 * 2**30), torus_dims=3),
    "v6e": TpuChip(flops_per_s=918e12, hbm_bytes=int(31.25 * 2**30), torus_dims=2),
}
"""Chips by the prefix of a topology name."""

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    # Google: cloud.google.com/tpu/docs/v4 and the pages above; jax calls v5e "v5 lite" and v5p plainly "v5".
    ("tpu v4", 275),
    ("tpu v5 lite", 197),
    ("tpu v5e", 197),
    ("tpu v5p", 459),
    ("tpu v5", 459),
    ("tpu v6 lite", 918),
    ("tpu v6e", 918),
    # NVIDIA's data sheets, dense (half of the figure "with sparsity").
    ("a100", 312),
    ("h100 pcie", 756),
    ("h100 nvl", 835),
    ("h100", 989),
    ("h200 nvl", 835),
    ("h200", 989),
    ("gh200", 989),
    ("gb200", 2500),
    ("b200", 2250),
    ("l40s", 362),
    ("l4", 121),
)
"""Dense bf16 TFLOP/s by part of jax's `device_kind`, in lower case; the first match counts."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of jax's `device_kind`, or None if unknown, as for a CPU."""
    kind = f" {device_kind.lower().replace('-', ' ')} "
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if f" {name} " in kind), None)
