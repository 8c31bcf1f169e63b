"""Decoder of all families.

The NNX modules define the structure. Outside of this file parameters are a plain nested dict of arrays, `{"layers":
{"q_proj": {"kernel": [layers, out, in]}}, ...}`, which jit, optax, Orbax and the sharding rules accept. `make_apply`
takes the structure (an abstract model's graphdef) once and returns a pure function `apply(params, tokens, positions,
segment_ids)` that merges them while tracing.

Each kernel is one `nnx.Param` for all layers, in Hugging Face's layout. `jax.lax.scan` passes one layer's slice at a
time to the same module, so compile time does not grow with depth. Master parameters keep their dtype. A layer's kernels
are cast to the compute dtype, and gathered on a mesh, inside the scan, so no second copy of the model exists.

The residual stream is [N, D], or [B, S, D] if a `sequence` axis splits a row's tokens. A layer works on any leading
dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from configs.sections.model import LoraConfig
from learner.model.activation_sharding import ActivationSharding
from learner.model.architecture import Architecture
from learner.model.attention.dispatch import attention
from learner.model.attention.xla import ATTENTION
from learner.model.moe import GATE, PROJECTION, ExpertLayout, moe_mlp
from learner.model.rope import Rotation, rotary_angles, rotate

_POLICIES = jax.checkpoint_policies


def _checkpoint(policy: Callable[..., Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda layer: jax.checkpoint(layer, prevent_cse=False, policy=policy)


REMAT: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "full": _checkpoint(None),
    "attention": _checkpoint(_POLICIES.save_only_these_names(ATTENTION)),
    "gate": _checkpoint(_POLICIES.save_only_these_names(ATTENTION, PROJECTION)),
    "dots": _checkpoint(_POLICIES.save_only_these_names(ATTENTION, PROJECTION, GATE)),
    "none": lambda layer: layer,
}
"""Rematerialization policies by name, with what backward recomputes. `full`: whole layers. `attention`: all but
attention, whose cost grows with row length and whose saved result is only [tokens, heads * head_dim] per layer. `gate`:
the MLP's gate projection and elementwise operations. `dots`: elementwise operations. `none`: nothing."""


Params = dict[str, Any]
"""Nested dict of arrays; `bridge.param_names.flatten` returns its paths."""
Apply = Callable[..., Array]
"""Forward function (params, tokens, positions, segment_ids, prefix_ids=None, routed_experts=None): `make_apply`."""
Attend = Callable[..., Array]
"""`learner.model.attention.dispatch.attention` with options bound: (q, k, v, segment_ids, *, window, prefix_ids)."""


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
NO_LORA = LoraConfig()
INIT_STD = 0.02
"""Standard deviation of initial kernels, as Hugging Face's `initializer_range`."""


class Linear(nnx.Module):
    """Linear map y = x W^T + b with stacked W [layers, out, in]; the scan calls it with one layer's W.

    With an adapter (`adapt`) y = x W^T + s (x A^T) B^T + b.
    """

    lora_a: nnx.Param | None = None
    lora_b: nnx.Param | None = None
    lora_scale = 0.0

    def __init__(self, stack: tuple[int, ...], d_out: int, d_in: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (*stack, d_out, d_in), jnp.float32) * INIT_STD
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, d_out), dtype)) if bias else None

    def adapt(self, rank: int, scale: float) -> None:
        """Adds a zero adapter (Hu et al., 2021, equation 3): A [layers, rank, in] and B [layers, out, rank]."""
        *stack, d_out, d_in = self.kernel.shape
        self.lora_a = nnx.Param(jnp.zeros((*stack, rank, d_in), self.kernel.dtype))
        self.lora_b = nnx.Param(jnp.zeros((*stack, d_out, rank), self.kernel.dtype))
        self.lora_scale = scale

    def __call__(self, x: Float[Array, "... d_in"]) -> Float[Array, "... d_out"]:
        """Returns the product in x's dtype."""
        y = _product(x, self.kernel)
        if self.lora_a is not None and self.lora_b is not None:
            y += _product(self.lora_scale * _product(x, self.lora_a), self.lora_b)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def _product(x: Float[Array, "... d_in"], weight: nnx.Param) -> Float[Array, "... d_out"]:
    return jax.lax.dot_general(x, weight[...].astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


class RMSNorm(nnx.Module):
    """RMS norm x / sqrt(mean(x^2) + eps) * (offset + scale), computed in float32."""

    def __init__(self, stack: tuple[int, ...], dim: int, *, config: Architecture, dtype):
        self.eps, self.offset = config.rms_norm_eps, config.family.norm_offset
        self.scale = nnx.Param(jnp.full((*stack, dim), 1.0 - self.offset, dtype))

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalizes the last dim; keeps the dtype."""
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (x32 * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class Embed(nnx.Module):
    """Token embedding table [V, D]."""

    def __init__(self, vocab_size: int, dim: int, *, dtype, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab_size, dim), jnp.float32) * INIT_STD
        self.embedding = nnx.Param(table.astype(dtype))


class Experts(nnx.Module):
    """Stack of one of the three expert kernels, [layers, experts, out, in]."""

    def __init__(self, stack: tuple[int, ...], d_out: int, d_in: int, *, dtype, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (*stack, d_out, d_in), jnp.float32) * INIT_STD
        self.kernel = nnx.Param(kernel.astype(dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of a layer, except the residual stream."""

    rotation: Rotation
    attend: Callable[[Array, Array, Array], Array]
    """Maps q, k, v [B, S, heads, hd] to the mixed values."""
    is_real: Bool[Array, "..."]
    """False for padding; has the residual stream's leading dims."""
    placement: ActivationSharding
    replayed: Int[Array, "... k"] | None = None
    """Experts of each token in this layer (`learner.model.moe.route`); None without routing replay."""


class Layer(nnx.Module):
    """Pre-norm attention and gated MLP, dense or MoE; holds all layers' weights and is called with one layer's."""

    def __init__(self, config: Architecture, *, dtype, rngs: nnx.Rngs):
        c, stack = config, (config.num_layers,)

        def linear(d_out: int, d_in: int, bias: bool = False) -> Linear:
            return Linear(stack, d_out, d_in, bias=bias, dtype=dtype, rngs=rngs)

        def norm(dim: int) -> RMSNorm:
            return RMSNorm(stack, dim, config=c, dtype=dtype)

        def experts(d_out: int, d_in: int) -> Experts:
            return Experts((*stack, c.num_experts), d_out, d_in, dtype=dtype, rngs=rngs)

        self.config = config
        self.input_norm = norm(c.hidden_size)
        self.q_proj = linear(c.num_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.k_proj = linear(c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.v_proj = linear(c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.q_norm = norm(c.head_dim) if c.qk_norm else None
        self.k_norm = norm(c.head_dim) if c.qk_norm else None
        self.o_proj = linear(c.hidden_size, c.num_heads * c.head_dim, c.o_bias)
        self.attention_out_norm = norm(c.hidden_size) if c.family.out_norms else None
        self.post_norm = norm(c.hidden_size)
        self.mlp_out_norm = norm(c.hidden_size) if c.family.out_norms else None
        if c.num_experts:
            self.router = linear(c.num_experts, c.hidden_size)
            self.experts_gate = experts(c.moe_intermediate_size, c.hidden_size)
            self.experts_up = experts(c.moe_intermediate_size, c.hidden_size)
            self.experts_down = experts(c.hidden_size, c.moe_intermediate_size)
        else:
            self.gate_proj = linear(c.intermediate_size, c.hidden_size, c.mlp_bias)
            self.up_proj = linear(c.intermediate_size, c.hidden_size, c.mlp_bias)
            self.down_proj = linear(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def __call__(self, x: Float[Array, "... D"], inputs: LayerInputs) -> Float[Array, "... D"]:
        """Applies one layer."""
        mixed = inputs.placement.tokens(self._attention(self.input_norm(x), inputs))
        x = x + (mixed if self.attention_out_norm is None else self.attention_out_norm(mixed))
        mlp = self._experts if self.config.num_experts else self._mlp
        mixed = inputs.placement.tokens(mlp(self.post_norm(x), inputs))
        return x + (mixed if self.mlp_out_norm is None else self.mlp_out_norm(checkpoint_name(mixed, PROJECTION)))

    def _attention(self, h: Array, inputs: LayerInputs) -> Array:
        c, rows, heads = self.config, inputs.rotation[0].shape[:2], inputs.placement.heads
        q, k, v = (checkpoint_name(project(h), PROJECTION) for project in (self.q_proj, self.k_proj, self.v_proj))
        q = heads(q.reshape(*rows, c.num_heads, c.head_dim))
        k = heads(k.reshape(*rows, c.num_kv_heads, c.head_dim))
        v = heads(v.reshape(*rows, c.num_kv_heads, c.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = heads(inputs.attend(rotate(q, inputs.rotation), rotate(k, inputs.rotation), v))
        return checkpoint_name(self.o_proj(mixed.reshape(*h.shape[:-1], c.num_heads * c.head_dim)), PROJECTION)

    def _mlp(self, h: Array, inputs: LayerInputs) -> Array:
        width, activation = inputs.placement.width, ACTIVATIONS[self.config.family.activation]
        gate, up = checkpoint_name(self.gate_proj(h), GATE), checkpoint_name(self.up_proj(h), PROJECTION)
        return self.down_proj(activation(width(gate)) * width(up))

    def _experts(self, h: Array, inputs: LayerInputs) -> Array:
        c, placement = self.config, inputs.placement
        return moe_mlp(
            h,
            inputs.is_real,
            self.router.kernel[...],
            (self.experts_gate.kernel[...], self.experts_up.kernel[...], self.experts_down.kernel[...]),
            num_per_token=c.num_experts_per_token,
            normalize=c.norm_topk_prob,
            layout=ExpertLayout() if placement.mesh is None else ExpertLayout.of(placement.specs),
            mesh=placement.mesh,
            replayed=inputs.replayed,
        )


class Decoder(nnx.Module):
    """Embedding, layers, final norm, and an output head unless it is tied to the embedding."""

    def __init__(self, config: Architecture, *, dtype, rngs: nnx.Rngs, lora: LoraConfig = NO_LORA):
        c = config
        self.config = config
        self.embed = Embed(c.vocab_size, c.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = Layer(c, dtype=dtype, rngs=rngs)
        for module in lora.modules:
            getattr(self.layers, module).adapt(lora.rank, lora.scale)
        self.final_norm = RMSNorm((), c.hidden_size, config=c, dtype=dtype)
        self.lm_head = (
            None
            if c.tie_word_embeddings
            else Linear((), c.vocab_size, c.hidden_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        prefix_ids: Array | None,
        routed_experts: Array | None,
        *,
        checkpoint,
        attend: Attend,
        placement: ActivationSharding,
    ) -> Float[Array, "B S D"]:
        """Returns the final hidden states; see `make_apply`."""
        c, lead = self.config, (-1,) if placement.is_flat else tokens.shape
        rotation = rotary_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        local = None if c.local_rope_theta is None else rotary_angles(positions, c.head_dim, c.local_rope_theta)
        is_real = (segment_ids != 0).reshape(lead)
        structure, stacked = nnx.graphdef(self.layers), nnx.to_pure_dict(nnx.state(self.layers))

        def one_layer(x: Array, xs: tuple[Any, Array, Array | None]) -> tuple[Array, None]:
            weights, is_windowed, replayed = xs
            mix = _windowed(functools.partial(attend, prefix_ids=prefix_ids), c, is_windowed, segment_ids)
            turn = (
                rotation if local is None else jax.tree.map(functools.partial(jnp.where, is_windowed), local, rotation)
            )
            inputs = LayerInputs(rotation=turn, attend=mix, is_real=is_real, placement=placement, replayed=replayed)
            return nnx.merge(structure, placement.layer(weights))(x, inputs), None

        x = placement.embed(self.embed.embedding[...], tokens)
        if c.family.scaled_embeddings:
            x *= jnp.asarray(c.hidden_size**0.5, x.dtype)
        x = placement.tokens(x.reshape(*lead, c.hidden_size))
        windowed = jnp.array(c.windowed_layers or (False,) * c.num_layers)
        replayed = None
        if routed_experts is not None:
            of_layers = jnp.moveaxis(routed_experts, 2, 0)
            replayed = of_layers.reshape(c.num_layers, *lead, c.num_experts_per_token)
        x, _ = jax.lax.scan(checkpoint(one_layer), x, (stacked, windowed, replayed))
        return self.final_norm(x).reshape(*tokens.shape, c.hidden_size)


def _windowed(attend: Attend, config: Architecture, is_windowed: Array, segment_ids: Array):
    """Returns the attention of one layer: windowed, full, or a branch if layers differ."""

    def full(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, segment_ids, window=None)

    def near(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, segment_ids, window=config.sliding_window)

    if not any(config.windowed_layers):
        return full
    if all(config.windowed_layers):
        return near
    return lambda q, k, v: jax.lax.cond(is_windowed, near, full, q, k, v)


def init_params(config: Architecture, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns initial parameters; jit it with `out_shardings` to create them in place on a mesh."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, dtype=dtype, rngs=nnx.Rngs(params=key))))


def abstract_params(config: Architecture, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns the parameters as `jax.ShapeDtypeStruct`, without allocation."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


def _structure(config: Architecture, lora: LoraConfig) -> tuple[Any, Params]:
    """Returns the graphdef that `make_apply` uses, and the parameters' shapes including adapters."""

    def make() -> Decoder:
        return Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(params=0), lora=lora)

    decoder = nnx.eval_shape(make)
    return nnx.graphdef(decoder), nnx.to_pure_dict(nnx.state(decoder))


def output_head(params: Params) -> Float[Array, "V D"]:
    """Returns the matrix that maps hidden states to logits: the head, or a tied model's embedding."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def make_apply(
    config: Architecture,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    remat: str = "attention",
    attention_path: str = "auto",
    attention_block: int | None = None,
    max_segments: int = 128,
    mesh: Mesh | None = None,
    lora: LoraConfig = NO_LORA,
) -> Apply:
    """Builds the pure forward `apply(params, tokens [B, S], positions [B, S], segment_ids [B, S], prefix_ids=None)`.

    A last argument `routed_experts` [B, S, layers, k] replaces the router's choice of experts (`moe.route`). It returns
    the final hidden states [B, S, D] in the compute dtype. They are finite but meaningless on padding (segment 0).
    Build it once and jit its callers, because each make_apply call creates a new function to compile. Raises ValueError
    if the remat policy is unknown.

    Args:
      compute_dtype: dtype of activations and matmuls; parameters keep theirs.
      remat: recomputation policy, a key of `learner.model.decoder.REMAT`.
      mesh: mesh that splits jit's arrays, by `learner.distributed.sharding`; None means one device. Without it XLA may
        split the hidden dim of activations instead of gathering the weights of an fsdp mesh.
      lora: adapters in the parameters in addition to the model's own (`bridge.param_names.combine`).
    """
    if remat not in REMAT:
        raise ValueError(f"remat: expected one of {sorted(REMAT)}, got {remat!r}")
    structure, shapes = _structure(config, lora)
    split = mesh if mesh is not None and mesh.size > 1 else None
    placement = ActivationSharding.of(shapes, split, compute_dtype)
    options: dict[str, Any] = dict(
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        path=attention_path,
        mesh=mesh,
        max_segments=max_segments,
    )
    if attention_block is not None:
        options["block"] = attention_block

    def apply(
        params: Params,
        tokens: ArrayLike,
        positions: ArrayLike,
        segment_ids: ArrayLike,
        prefix_ids: ArrayLike | None = None,
        routed_experts: ArrayLike | None = None,
    ) -> Array:
        return nnx.merge(structure, params)(
            jnp.asarray(tokens),
            jnp.asarray(positions),
            jnp.asarray(segment_ids),
            None if prefix_ids is None else jnp.asarray(prefix_ids),
            None if routed_experts is None else jnp.asarray(routed_experts),
            checkpoint=REMAT[remat],
            attend=functools.partial(attention, **options),
            placement=placement,
        )

    return apply
