"""Stochastic rounding of parameters that are kept in bfloat16.

A step of AdamW changes a weight by about the learning rate. A bfloat16 of 0.02 has its neighbors 1.2e-4 away, so
rounding to the nearest loses steps of 1e-6 entirely. Rounding up with the probability of the part that is lost keeps
the expected weight exact, and many small steps add up as they do in float32.

The random bits are a hash of each number's place in its array and of two words a leaf, so they depend neither on the
mesh nor on the order of evaluation, are elementwise, and take no memory beside the step they are fused with.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt32

from learner.model.decoder import Params

Words = UInt32[Array, "2"]
"""Values that tell the bits of one leaf and one step from all others."""


def rounding_words(params: Params, *, seed: int, step: Array, epoch: Array) -> Params:
    """Returns the words of each parameter, a tree like theirs: the same for one seed, step and pass over a batch."""
    # Of one named generator, so that neither a flag of JAX nor its next default changes what a resumed run does.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step), epoch)
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(list(jax.random.bits(key, (len(leaves), 2), jnp.uint32)))


def round_stochastically(x: Float32[Array, "*shape"], dtype: DTypeLike, words: Words) -> Float[Array, "*shape"]:
    """Rounds to one of the two nearest numbers of `dtype`, so that the expectation is x; what it holds stays exact.

    For bfloat16, which is the upper half of a float32: (bits(x) + u) with its lower half cut off, u uniform in
    [0, 2^16) (Gupta et al., 2015, section 3). float32 is handed back as it is.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return x
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(f"stochastic rounding: expected float32 or bfloat16, got {jnp.dtype(dtype)}")
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = (bits + _uniform_halves(x.shape, words)) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(up, jnp.float32)
    # Infinities are exact already; a NaN's bits would overflow into the sign.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _uniform_halves(shape: tuple[int, ...], words: Words) -> UInt32[Array, "*shape"]:
    """Uniform integers in [0, 2^16), by place; places repeat after 2^32."""
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mixed(_mixed(place ^ words[0]) + words[1]) >> 16


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of 32 bits of which each depends on all (the last step of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
