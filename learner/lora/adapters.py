"""Adapters as a tree of parameters of their own: their shapes, their start, and the weights that they make of a base.

    layers/q_proj/lora_a   A [layers, rank, in]     uniform in +-1 / sqrt(in), as PEFT begins
    layers/q_proj/lora_b   B [layers, out, rank]    zero, so that the first step's model is the base

The base is a tree of the model's own parameters, frozen. `bridge.adapter_names.combine` puts both into one tree, which
the decoder applies; `merge` adds s B A to the matrices (Hu et al., 2021, section 4.1).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from bridge.adapter_names import A, AdapterNames, B
from bridge.names import flatten, unflatten
from configs.sections.lora import LoraConfig
from learner.model.config import Architecture
from learner.model.decoder import Params, abstract_params


def names_of(architecture: Architecture, config: LoraConfig) -> AdapterNames:
    """The adapters' names."""
    return AdapterNames(model=architecture.param_names, modules=config.modules)


def abstract_adapters(architecture: Architecture, config: LoraConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The adapters as `jax.ShapeDtypeStruct`; an empty tree where they are off."""
    kernels = flatten(abstract_params(architecture))
    shapes: dict[str, Any] = {}
    for module in config.modules:
        *stack, num_out, num_in = kernels[f"layers/{module}/kernel"].shape
        shapes[f"layers/{module}/{A}"] = jax.ShapeDtypeStruct((*stack, config.rank, num_in), dtype)
        shapes[f"layers/{module}/{B}"] = jax.ShapeDtypeStruct((*stack, num_out, config.rank), dtype)
    return unflatten(shapes)


def init_adapters(architecture: Architecture, config: LoraConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Adapters that change nothing yet; jit it with `out_shardings` to make them in place on a mesh."""
    shapes = flatten(abstract_adapters(architecture, config, dtype))
    keys = jax.random.split(key, len(shapes))

    def one(path: str, shape: tuple[int, ...], key: Array) -> Array:
        if path.endswith(B):
            return jnp.zeros(shape, dtype)
        bound = shape[-1] ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return unflatten({path: one(path, x.shape, k) for (path, x), k in zip(shapes.items(), keys, strict=True)})


def merge(base: Params, adapters: Params, *, scale: float, dtype: DTypeLike) -> Params:
    """The base with s B A added, in `dtype` where there is an adapter; all other leaves are the base's own arrays.

    The sum is taken in float32, a layer at a time, and split over the mesh as the base is.
    """
    leaves, parts = dict(flatten(base)), flatten(adapters)
    for path_a in (path for path in parts if path.endswith(f"/{A}")):
        prefix = path_a.rpartition("/")[0]
        kernel = leaves[f"{prefix}/kernel"]
        add = _add(kernel.sharding if isinstance(kernel, jax.Array) else None)
        leaves[f"{prefix}/kernel"] = add(kernel, parts[path_a], parts[f"{prefix}/{B}"], scale, jnp.dtype(dtype))
    return unflatten(leaves)


@functools.cache
def _add(sharding: Any) -> Any:
    """Jitted `kernel + scale B A`, split as the kernel is."""

    def add(
        kernel: Float[Array, "L out in"],
        a: Float[Array, "L r in"],
        b: Float[Array, "L out r"],
        scale: float,
        dtype: jnp.dtype,
    ) -> Float[Array, "L out in"]:
        def one(of_layer: tuple[Array, Array, Array]) -> Array:
            w, a, b = (x.astype(jnp.float32) for x in of_layer)
            return (w + scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)).astype(dtype)

        return jax.lax.map(one, (kernel, a, b))

    return jax.jit(add, static_argnums=(3, 4), out_shardings=sharding)
