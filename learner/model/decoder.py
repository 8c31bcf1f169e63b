"""The decoder: Qwen2, Qwen2.5 and Qwen3, from tokens to the final hidden state.

How NNX is used here. The modules below own the structure; outside of this file parameters are a plain
nested dict of arrays, `{"layers": {"q_proj": {"kernel": [layers, out, in]}}, ...}`, which jit, optax, Orbax
and the sharding rules take as it is. `make_apply` takes the structure (an abstract model's graphdef) once and
returns a pure function `apply(params, tokens, positions, segment_ids)` that merges it back while tracing.

Each kernel is one `nnx.Param` for all layers, in Hugging Face's layout. `jax.lax.scan` hands one layer's
slice at a time to the same module, so compile time doesn't grow with depth. Master parameters keep their own
dtype; a layer's kernels are cast to the compute dtype inside the scan, so no second copy of the model exists.
Projections see activations flattened to [N, D]: on XLA-CPU this halves the time of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from learner.model.attention import attention
from learner.model.config import ModelConfig

Params = dict[str, Any]
"""Nested dict of arrays; `bridge.names.flatten` gives its paths."""
Apply = Callable[[Params, ArrayLike, ArrayLike, ArrayLike], Array]

INIT_STD = 0.02
"""Standard deviation of fresh kernels, as in Hugging Face's `initializer_range`."""


class Linear(nnx.Module):
    """y = x W^T + b with W stacked as [layers, out, in]; called inside the scan with one layer's W."""

    def __init__(self, stack: tuple[int, ...], d_out: int, d_in: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        """Draws the kernel from N(0, 0.02^2); the bias is zero."""
        kernel = jax.random.normal(rngs.params(), (*stack, d_out, d_in), jnp.float32) * INIT_STD
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, d_out), dtype)) if bias else None

    def __call__(self, x: Float[Array, "N d_in"]) -> Float[Array, "N d_out"]:
        """The product in x's dtype."""
        y = jax.lax.dot_general(x, self.kernel[...].astype(x.dtype), (((1,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 inside."""

    def __init__(self, stack: tuple[int, ...], dim: int, *, eps: float, dtype):
        """Scale one."""
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((*stack, dim), dtype))

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalises the last dim; same dtype out."""
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Embed(nnx.Module):
    """The token table [V, D]."""

    def __init__(self, vocab_size: int, dim: int, *, dtype, rngs: nnx.Rngs):
        """Draws from N(0, 0.02^2)."""
        table = jax.random.normal(rngs.params(), (vocab_size, dim), jnp.float32) * INIT_STD
        self.embedding = nnx.Param(table.astype(dtype))


class Layer(nnx.Module):
    """Pre-norm attention and gated MLP; holds all layers' weights, called with one layer's."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        """Fresh weights for all layers."""
        c, stack = config, (config.num_layers,)

        def linear(d_out: int, d_in: int, bias: bool = False) -> Linear:
            return Linear(stack, d_out, d_in, bias=bias, dtype=dtype, rngs=rngs)

        def norm(dim: int) -> RMSNorm:
            return RMSNorm(stack, dim, eps=c.rms_norm_eps, dtype=dtype)

        self.config = config
        self.input_norm = norm(c.hidden_size)
        self.q_proj = linear(c.num_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.k_proj = linear(c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.v_proj = linear(c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias)
        self.q_norm = norm(c.head_dim) if c.qk_norm else None
        self.k_norm = norm(c.head_dim) if c.qk_norm else None
        self.o_proj = linear(c.hidden_size, c.num_heads * c.head_dim, c.o_bias)
        self.post_norm = norm(c.hidden_size)
        self.gate_proj = linear(c.intermediate_size, c.hidden_size)
        self.up_proj = linear(c.intermediate_size, c.hidden_size)
        self.down_proj = linear(c.hidden_size, c.intermediate_size)

    def __call__(self, x: Float[Array, "N D"], rotation, attend: Callable[..., Array]) -> Float[Array, "N D"]:
        """One layer; `rotation` is `rotary_angles`, `attend` takes q, k, v [B, S, heads, hd]."""
        c, (batch, length) = self.config, rotation[0].shape[:2]
        h = self.input_norm(x)
        q = self.q_proj(h).reshape(batch, length, c.num_heads, c.head_dim)
        k = self.k_proj(h).reshape(batch, length, c.num_kv_heads, c.head_dim)
        v = self.v_proj(h).reshape(batch, length, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.o_proj(mixed.reshape(batch * length, c.num_heads * c.head_dim))
        h = self.post_norm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h))


class Decoder(nnx.Module):
    """Embedding, layers, final norm, and the output head when it isn't the embedding."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        """Fresh weights in `dtype`."""
        c = config
        self.config = config
        self.embed = Embed(c.vocab_size, c.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = Layer(c, dtype=dtype, rngs=rngs)
        self.final_norm = RMSNorm((), c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if c.tie_word_embeddings
            else Linear((), c.vocab_size, c.hidden_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens, positions, segment_ids, *, compute_dtype, checkpoint, attend, constrain) -> Array:
        """Final hidden states; see `make_apply`."""
        batch, length = tokens.shape
        rotation = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        structure, stacked = nnx.split(self.layers)

        def one_layer(x, weights):
            layer = nnx.merge(structure, weights)
            x = layer(x, rotation, lambda q, k, v: attend(q, k, v, segment_ids, positions))
            return constrain(x), None

        x = self.embed.embedding[...][tokens.reshape(batch * length)].astype(compute_dtype)
        x, _ = jax.lax.scan(checkpoint(one_layer), constrain(x), stacked)
        return self.final_norm(x).reshape(batch, length, self.config.hidden_size)


def rotary_angles(positions: Int[Array, "B S"], head_dim: int, theta: float) -> tuple[Array, Array]:
    """(sin, cos) of position * theta^(-2i / hd), float32 [B, S, 1, hd / 2] (RoPE, Su et al. 2021, eq. 15)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x: Float[Array, "B S H hd"], rotation: tuple[Array, Array]) -> Float[Array, "B S H hd"]:
    """Rotates the pairs (i, i + hd / 2), Hugging Face's order, in float32 inside."""
    sin, cos = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


_REMAT: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda layer: layer,
    "full": lambda layer: jax.checkpoint(layer, prevent_cse=False),
    "dots": lambda layer: jax.checkpoint(
        layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def init_params(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Fresh parameters; jit it with `out_shardings` to make them in place on a mesh."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, dtype=dtype, rngs=nnx.Rngs(params=key))))


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`; nothing is allocated."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


def output_head(params: Params) -> Float[Array, "V D"]:
    """The matrix that turns hidden states into logits: the head, or a tied model's embedding."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def make_apply(
    config: ModelConfig,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    remat: str = "full",
    attention_path: str = "xla",
    attention_block: int = 1024,
    activation_sharding: jax.sharding.Sharding | None = None,
) -> Apply:
    """Builds the pure forward `apply(params, tokens [B, S], positions [B, S], segment_ids [B, S])`.

    It returns the final hidden states [B, S, D] in the compute dtype, finite on padding (segment 0) too, but
    meaningless there. Build it once and jit what calls it; each call of make_apply is a new function to jit.

    Args:
      config: the model.
      compute_dtype: dtype of activations and matmuls; the parameters stay what they are.
      remat: 'full' recomputes a layer in backward, 'dots' keeps its projections, 'none' keeps everything.
      attention_path: see `learner.model.attention.PATHS`.
      attention_block: queries taken at a time, in tokens.
      activation_sharding: pins the residual stream [N, D], usually `mesh.batch_sharding(mesh)`. Without it
        XLA may split the hidden dim of activations instead of gathering the weights of an fsdp mesh.

    Raises:
      ValueError: no such remat policy.
    """
    if remat not in _REMAT:
        raise ValueError(f"remat: got {remat!r}, wanted one of {sorted(_REMAT)}")
    structure = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(params=0))))
    scale = config.head_dim**-0.5

    def attend(*args: Array) -> Array:
        return attention(*args, scale=scale, path=attention_path, block=attention_block)

    def constrain(x: Array) -> Array:
        if activation_sharding is None:
            return x
        return jax.lax.with_sharding_constraint(x, activation_sharding)

    def apply(params: Params, tokens: ArrayLike, positions: ArrayLike, segment_ids: ArrayLike) -> Array:
        model = nnx.merge(structure, params)
        return model(
            jnp.asarray(tokens),
            jnp.asarray(positions),
            jnp.asarray(segment_ids),
            compute_dtype=compute_dtype,
            checkpoint=_REMAT[remat],
            attend=attend,
            constrain=constrain,
        )

    return apply
