"""Mixture-of-experts MLP and grouped matmul.

A token goes to the k experts of highest router probability, and their outputs are summed with those weights. No token
is dropped, and experts have no capacity limit. (token, expert) pairs are sorted by expert, and each run of rows is
multiplied by its expert's kernel.

`jax.lax.ragged_dot` runs everywhere, but not always as a grouped product. XLA-CPU computes all experts for all rows,
and XLA for TPU does so for the kernel gradient (Qwen3-30B-A3B: 23 of 25 s of a micro-batch, compiled for v5p). TPUs
therefore use megablox, the Pallas kernel in JAX. GPUs use XLA's lowering, which is not measured.

On a mesh the layer is one `shard_map`. Each device routes its own tokens. Devices along `expert` gather each other's
tokens, compute the experts that they hold for all of them, and reduce-scatter the results. `tensor` splits the experts'
width. Kernels are gathered over their fsdp axes in the compute dtype, and their gradients are reduce-scattered.

Memory per device, forward or backward: with n tokens per device and E shards of experts, all E n k pairs may be on one
device. They are computed in E steps of n k rows, so the buffers hold n k (2 D + 3 F) numbers for any balance, and steps
after the last row are skipped. A balanced router takes one or two steps; an unbalanced one costs time, not memory. Only
[E n, D] twice (tokens, sums) grows with E.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from learner.distributed.sharding import BATCH_AXES, Axes, axes_size

GroupedMatmul = Callable[[Array, Array, Array], Array]
"""(rows [M, in], kernels [E, out, in], sizes [E]) -> [M, out]; rows after the last run are undefined."""


PROJECTION, GATE = "projection", "gate"
"""Names of projections for rematerialization (`learner.model.decoder.REMAT`): the MLP's gate, and all others."""

_TILE = (512, 1024, 768)
"""Maximum rows, contraction and outputs of a tile."""


def ragged(
    rows: Float[Array, "M d_in"], kernels: Float[Array, "E d_out d_in"], sizes: Int[Array, " E"]
) -> Float[Array, "M d_out"]:
    """Computes the grouped product by XLA's own operation, which contracts a kernel's middle dim."""
    return jax.lax.ragged_dot(rows, kernels.swapaxes(1, 2), sizes)


def megablox(
    rows: Float[Array, "M d_in"],
    kernels: Float[Array, "E d_out d_in"],
    sizes: Int[Array, " E"],
    *,
    tile: tuple[int, int, int] = _TILE,
    interpret: bool = False,
) -> Float[Array, "M d_out"]:
    """Computes the grouped product by the TPU kernel, with rows padded to tiles; `interpret` is for tests."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    num_rows = rows.shape[0]
    # Sublanes of the narrowest dtype come in groups of 16; a tile needs no more rows than exist.
    height = min(tile[0], -(-num_rows // 16) * 16)
    padded = jnp.pad(rows, ((0, -num_rows % height), (0, 0)))
    out = ops.gmm(padded, kernels, sizes, rows.dtype, (height, *tile[1:]), None, None, True, interpret)
    return out[:num_rows]


def grouped_matmul(platform: str) -> GroupedMatmul:
    """Returns the grouped product for a platform ("tpu", "gpu", "cpu")."""
    return megablox if platform == "tpu" else ragged


Kernels = tuple[Array, Array, Array]
"""(gate [E, F, D], up [E, F, D], down [E, D, F])."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Partition specs of one layer's experts; unsplit by default."""

    gate: PartitionSpec = PartitionSpec(None, None, None)
    """Spec of the gate and up kernels [experts, out, in]."""
    down: PartitionSpec = PartitionSpec(None, None, None)

    @classmethod
    def of(cls, specs: Mapping[str, PartitionSpec]) -> ExpertLayout:
        """Returns the layout from the specs of the stacked kernels, by path."""
        gate, down = (specs[f"layers/experts_{name}/kernel"] for name in ("gate", "down"))
        return cls(gate=PartitionSpec(*gate[1:]), down=PartitionSpec(*down[1:]))

    @property
    def expert(self) -> Axes:
        """Axes that split the experts."""
        return self.gate[0]

    @property
    def width(self) -> Axes:
        """Axis that splits the width of experts after the kernels are gathered."""
        return "tensor" if "tensor" in axes_names(self.gate[1]) else None


def route(
    x: Float[Array, "N D"],
    kernel: Float[Array, "E D"],
    *,
    num_per_token: int,
    normalize: bool,
    replayed: Int[Array, "N k"] | None = None,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Returns the k largest of softmax(x kernel^T), in float32, and the indices of their experts.

    With `normalize` the k weights are divided by their sum. This matches Qwen3-MoE's reference code, except that logits
    stay float32 instead of being rounded to the compute dtype.

    Tokens with `replayed` experts (>= 0) use those instead, with weights as if they were the largest (R3, Ma et al.,
    2025): p_e, divided by the sum of p over the replayed experts with `normalize`.
    """
    logits = jnp.einsum("nd,ed->ne", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(logits, -1)
    weights, experts = jax.lax.top_k(probabilities, num_per_token)
    if replayed is not None:
        experts = jnp.where(replayed >= 0, replayed.astype(experts.dtype), experts)
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts


def experts_mlp(
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    experts: Int[Array, "N k"],
    kernels: Kernels,
    *,
    num_steps: int = 1,
    multiply: GroupedMatmul = ragged,
) -> Float[Array, "N D"]:
    """Returns sum_j weights_j down_e(silu(gate_e x) * up_e x) with e = experts_j; float32 sums.

    Pairs whose expert is outside [0, E) are left out (another device's, or padding). The pairs are computed in
    `num_steps` equal steps; steps without rows are skipped.
    """
    num_tokens, k = experts.shape
    num_experts, num_rows = kernels[0].shape[0], experts.size // num_steps
    is_here = (experts >= 0) & (experts < num_experts)
    group = jnp.where(is_here, experts, num_experts).reshape(-1)
    order = jnp.argsort(group, stable=True)
    ends = jnp.cumsum(jnp.bincount(group, length=num_experts + 1)[:num_experts])
    flat_weights = weights.reshape(-1)

    def one_step(start: Array) -> Array:
        pairs = jax.lax.dynamic_slice(order, (start,), (num_rows,))
        rows_of = jnp.clip(ends - start, 0, num_rows)
        sizes = jnp.diff(rows_of, prepend=0).astype(jnp.int32)
        # Rows beyond the last group are undefined; masking input and output excludes their values and gradients.
        is_row = (jnp.arange(num_rows) < rows_of[-1])[:, None]
        rows = jnp.where(is_row, x[pairs // k], 0)
        out = jnp.where(is_row, _grouped_mlp(rows, kernels, sizes, multiply), 0)
        scaled = out.astype(jnp.float32) * flat_weights[pairs][:, None]
        return jnp.zeros(x.shape, jnp.float32).at[pairs // k].add(scaled)

    if num_steps == 1:
        return one_step(jnp.int32(0))
    first = jax.checkpoint(one_step)(jnp.int32(0))
    nothing = jnp.zeros_like(first)  # varies over the same mesh axes as the other branch

    # The checkpoint is around the branch: otherwise residuals of the branch are stacked, one copy per step.
    @jax.checkpoint
    def one_step_if_any(start: Array) -> Array:
        return jax.lax.cond(start < ends[-1], one_step, lambda _: nothing, start)

    starts = jnp.arange(1, num_steps, dtype=jnp.int32) * num_rows
    return jax.lax.scan(lambda total, start: (total + one_step_if_any(start), None), first, starts)[0]


def moe_mlp(
    x: Float[Array, "... D"],
    is_real: Bool[Array, "..."],
    router: Float[Array, "E D"],
    kernels: Kernels,
    *,
    num_per_token: int,
    normalize: bool,
    layout: ExpertLayout,
    mesh: Mesh | None,
    replayed: Int[Array, "... k"] | None = None,
) -> Float[Array, "... D"]:
    """Returns the layer's MLP, in x's dtype; padding tokens are not routed and give zero.

    `x` is [N, D] split over the batch axes, or [B, S, D] split over them and `sequence`. Without a mesh everything is
    computed locally. `normalize` and `replayed` are those of `route`.
    """
    num_shards = 1 if mesh is None else axes_size(mesh, layout.expert)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    multiply = grouped_matmul(device.platform)

    def local(x: Array, is_real: Array, replayed: Array | None, router: Array, kernels: Kernels) -> Array:
        tokens = x.reshape(-1, x.shape[-1])
        given = None if replayed is None else replayed.reshape(-1, num_per_token)
        weights, experts = route(tokens, router, num_per_token=num_per_token, normalize=normalize, replayed=given)
        experts = jnp.where(is_real.reshape(-1, 1), experts, -1)
        layouts = (layout.gate, layout.gate, layout.down)
        gate, up, down = (_gather_kernel(w.astype(x.dtype), spec) for w, spec in zip(kernels, layouts, strict=True))
        if num_shards > 1:
            tokens, weights, experts = (_gather(y, layout.expert, 0) for y in (tokens, weights, experts))
            first = jax.lax.axis_index(layout.expert) * gate.shape[0]
            experts = jnp.where(experts < 0, -1, experts - first)
        out = experts_mlp(tokens, weights, experts, (gate, up, down), num_steps=num_shards, multiply=multiply).astype(
            x.dtype
        )
        if num_shards > 1:
            out = jax.lax.psum_scatter(out, layout.expert, scatter_dimension=0, tiled=True)
        if layout.width is not None:
            out = jax.lax.psum(out, layout.width)
        return out.reshape(x.shape)

    if mesh is None:
        return local(x, is_real, replayed, router, kernels)
    # Flattened tokens are split over the batch axes only: `sequence` has size 1 and is named for the vma checker.
    tokens = PartitionSpec((*BATCH_AXES, "sequence")) if x.ndim == 2 else PartitionSpec(BATCH_AXES, "sequence")
    specs = (tokens, tokens, tokens, PartitionSpec(), (layout.gate, layout.gate, layout.down))
    # A Pallas kernel does not declare the axes over which its output varies, so vma is not checked.
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return run(x, is_real, replayed, router, kernels)


def _grouped_mlp(rows: Array, kernels: Kernels, sizes: Array, multiply: GroupedMatmul) -> Array:
    """Returns down(silu(gate rows) * up rows), with each run of rows multiplied by its expert's kernels."""
    gate, up, down = kernels
    gated = jax.nn.silu(checkpoint_name(multiply(rows, gate, sizes), GATE))
    hidden = gated * checkpoint_name(multiply(rows, up, sizes), PROJECTION)
    return checkpoint_name(multiply(hidden, down, sizes), PROJECTION)


def _gather(x: Array, axes: Axes, dim: int) -> Array:
    return x if axes is None else jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def _gather_kernel(kernel: Array, spec: PartitionSpec) -> Array:
    """Returns [local experts, out, in], split at most over `tensor`."""
    for dim in (1, 2):
        # `tensor` is the first axis of a dim that is split further, so the gathered part is contiguous.
        rest = tuple(name for name in axes_names(spec[dim]) if name != "tensor")
        kernel = _gather(kernel, rest or None, dim)
    return kernel


def axes_names(axes: Axes) -> tuple[str, ...]:
    """Returns the mesh axes of one dim."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
