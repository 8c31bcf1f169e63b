"""Model FLOPs of a step, and what a chip can do: the two sides of MFU. Pure, without jax.

Convention (Chowdhery et al., 2022, "PaLM", appendix B, with the differences named):

- A matmul of n multiply-adds is 2 n FLOPs. Backward costs twice the forward, so a matmul parameter costs 6 FLOPs
  a token. Norms, rotations, softmax and the optimizer are not counted; nor is a lookup in the embedding.
- Of a mixture of experts only the experts that a token goes to are counted, and the router.
- Attention is causal within a sequence: a token attends to half of its sequence on average, so a sequence of L
  tokens costs 2 L^2 H hd FLOPs forward a layer (q k^T and p v, L^2 / 2 pairs each). PaLM and many tables count
  all L^2 pairs: `causal=False`, which flatters long rows by up to a factor of two.
- The head is counted where a token is scored, since only those logits enter the loss. Pass `num_tokens` as
  `num_scored_tokens` to compare with pre-training, where every token is scored.
- What rematerialisation computes a second time is no model FLOP. `launch.tools.compile_tpu` counts it (HFU).
"""

import dataclasses

from configs.sections.model import LoraConfig
from learner.model.architecture import Architecture


def matmul_params(config: Architecture) -> int:
    """Parameters that a token is multiplied with in the layers; active experts only, no embedding, no head."""
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
    """Returns the FLOPs of a forward pass, which is also what scoring costs; the arguments are `model_flops`'."""
    return sum(_forward_parts(config, num_tokens, num_scored_tokens, sum_squared_lengths, causal=True))


def model_flops(
    config: Architecture,
    *,
    num_tokens: float,
    num_scored_tokens: float,
    sum_squared_lengths: float,
    causal: bool = True,
    num_adapter_params: int = 0,
) -> float:
    """FLOPs that a training step can't do without: 3 x (2 N T + 2 D V T_scored + 2 L H hd sum_i n_i^2).

    With adapters of M parameters in all matrices are frozen, whose own gradients nobody makes: 2 x (2 N T + 2 D V
    T_scored) + 3 x (2 M T + 2 L H hd sum_i n_i^2). (The first layer's input needs no gradient either; that is counted.)

    Args:
      config: the model.
      num_tokens: real tokens T, prompts too; padding is no work.
      num_scored_tokens: tokens that enter the loss; the head is counted for these.
      sum_squared_lengths: sum over the sequences of their squared length, prompt and response together.
      causal: count the L^2 / 2 pairs that a causal mask leaves; False counts all, as PaLM does. A sliding
        window makes fewer pairs than either, which is not taken off.
      num_adapter_params: of low-rank adapters, where they alone are trained; 0: all parameters are.
    """
    layers, attention, head = _forward_parts(config, num_tokens, num_scored_tokens, sum_squared_lengths, causal)
    if not num_adapter_params:
        return 3 * (layers + attention + head)
    return 2 * (layers + head) + 3 * (attention + 2.0 * num_adapter_params * num_tokens)


def adapter_params(config: Architecture, lora: LoraConfig) -> int:
    """Parameters of the adapters: rank x (in + out) of each matrix that has one; 0 where they are off."""
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
    config: Architecture, num_tokens: float, num_scored_tokens: float, sum_squared_lengths: float, causal: bool
) -> tuple[float, float, float]:
    """FLOPs of the projections and MLPs, of attention, and of the head."""
    pairs = sum_squared_lengths / 2 if causal else sum_squared_lengths
    return (
        2.0 * matmul_params(config) * num_tokens,
        4.0 * config.num_layers * config.num_heads * config.head_dim * pairs,
        2.0 * config.hidden_size * config.vocab_size * num_scored_tokens,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuChip:
    """What a TPU chip can do, and the shape of its slices."""

    flops_per_s: float
    """Dense bf16."""
    hbm_bytes: int
    """What a program may use: the published capacity less what the runtime keeps, as XLA's out-of-memory
    message states it."""
    torus_dims: int
    """Dims of the interconnect."""


# Sources: cloud.google.com/tpu/docs/v5e, /v5p, /v6e (bf16 peak).
TPU_CHIPS: dict[str, TpuChip] = {
    "v5e": TpuChip(flops_per_s=197e12, hbm_bytes=int(15.75 * 2**30), torus_dims=2),
    "v5p": TpuChip(flops_per_s=459e12, hbm_bytes=int(95.74 * 2**30), torus_dims=3),
    "v6e": TpuChip(flops_per_s=918e12, hbm_bytes=int(31.25 * 2**30), torus_dims=2),
}
"""By the name a topology starts with."""

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
"""Part of jax's `device_kind`, lower case -> dense bf16 TFLOP/s; the first that fits counts."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device by jax's `device_kind`; None where it isn't known, as for a CPU."""
    kind = f" {device_kind.lower().replace('-', ' ')} "
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if f" {name} " in kind), None)
