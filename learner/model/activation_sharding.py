"""Shardings of the decoder's arrays: pinned activations, and kernels gathered in the compute dtype.

Without a mesh every function here is the identity, so the decoder has a single code path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from bridge.param_names import EXPERTS_PREFIX, flatten, unflatten
from learner.distributed.sharding import BATCH_AXES, Axes, axes_size, param_spec
from learner.model.moe import axes_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSharding:
    """Mesh, specs of the stacked parameters, and the dtype of device-to-device transfers."""

    mesh: Mesh | None
    specs: Mapping[str, PartitionSpec]
    """Partition specs by path (`bridge.param_names`); empty without a mesh."""
    compute_dtype: DTypeLike

    @classmethod
    def of(cls, params: Mapping[str, Any], mesh: Mesh | None, compute_dtype: DTypeLike) -> ActivationSharding:
        """Returns the sharding for the model's abstract parameters."""
        specs = {} if mesh is None else {p: param_spec(p, x.shape, mesh) for p, x in flatten(params).items()}
        return cls(mesh=mesh, specs=specs, compute_dtype=compute_dtype)

    @property
    def is_flat(self) -> bool:
        """True if tokens are one dim: [N, D] halves XLA-CPU's MLP time but cannot be split over `sequence`."""
        return self.mesh is None or self.mesh.shape["sequence"] == 1

    def tokens(self, x: Array) -> Array:
        """Pins [N, ...] or [B, S, ...] to the devices that hold the tokens; other dims are whole."""
        return self._pin(x, *(BATCH_AXES,) if self.is_flat else (BATCH_AXES, "sequence"))

    def heads(self, x: Float[Array, "B S H hd"]) -> Float[Array, "B S H hd"]:
        """Pins [B, S, H, hd] as `tokens`, with heads split over `tensor`."""
        return self._pin(x, BATCH_AXES, "sequence", "tensor")

    def width(self, x: Float[Array, "... F"]) -> Float[Array, "... F"]:
        """Pins an array as `tokens`, with the last dim split over `tensor`."""
        lead = (BATCH_AXES,) if self.is_flat else (BATCH_AXES, "sequence")
        return self._pin(x, *lead, "tensor")

    def layer(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one layer's weights for matmuls: kernels and biases are cast, then gathered over their fsdp axes.

        The gradient is reduce-scattered to the parameter's sharding in the compute dtype. With bfloat16, each device's
        part is rounded before the sum, for half the bytes of float32. Experts are unchanged, because
        `learner.model.moe` gathers them.
        """
        flat = flatten({"layers": weights})
        for path, leaf in flat.items():
            if path.endswith("/scale") or path.startswith(EXPERTS_PREFIX):
                continue
            leaf = leaf.astype(self.compute_dtype)
            if self.mesh is not None:
                own = PartitionSpec(*self.specs[path][1:])
                whole = PartitionSpec(*("tensor" if "tensor" in axes_names(axes) else None for axes in own))
                leaf = _gather(NamedSharding(self.mesh, own), NamedSharding(self.mesh, whole), leaf)
            flat[path] = leaf
        return unflatten(flat)["layers"]

    def embed(self, table: Float[Array, "V D"], tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns the table's rows of the tokens, in the compute dtype, without moving the table.

        Devices that split its columns look up each other's tokens and exchange the pieces (an all-to-all as large as
        the activations). Devices that split its rows look up their own words, and a sum combines the results.
        """
        if self.mesh is None:
            return _rows_of(table, tokens, self.compute_dtype)
        rows, columns = self.specs["embed/embedding"]
        specs = (self.specs["embed/embedding"], PartitionSpec(BATCH_AXES, "sequence"))
        split = (*axes_names(rows), *axes_names(columns))
        copied = tuple(axis for axis in (*BATCH_AXES, "sequence") if axis not in split)
        local = functools.partial(_lookup, rows=rows, columns=columns, copied=copied, dtype=self.compute_dtype)
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(BATCH_AXES, "sequence", None)
        )(table, tokens)

    def _pin(self, x: Array, *axes: Axes) -> Array:
        if self.mesh is None:
            return x
        # A head count that `tensor` does not divide stays whole, as its kernel does.
        kept = [a if d % axes_size(self.mesh, a) == 0 else None for d, a in zip(x.shape, axes, strict=False)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*kept)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(own: NamedSharding, whole: NamedSharding, x: Array) -> Array:
    # Pinned first: otherwise XLA moves the cast after the gather and transfers float32.
    x = jax.lax.with_sharding_constraint(x, own)
    return jax.lax.with_sharding_constraint(x, whole)


def _gather_forward(own: NamedSharding, whole: NamedSharding, x: Array) -> tuple[Array, None]:
    return _gather(own, whole, x), None


def _gather_backward(own: NamedSharding, whole: NamedSharding, _: None, d_x: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(d_x, own),)


_gather.defvjp(_gather_forward, _gather_backward)


def _lookup(
    table: Array, tokens: Array, *, rows: Axes, columns: Axes, copied: tuple[str, ...], dtype: DTypeLike
) -> Array:
    """Returns one device's part of `ActivationSharding.embed`; the table is the same over the axes `copied`."""
    flat = tokens.reshape(-1)
    if columns is not None:
        flat = jax.lax.all_gather(flat, columns, tiled=True)
    first = 0 if rows is None else jax.lax.axis_index(rows) * table.shape[0]
    is_here = (flat >= first) & (flat < first + table.shape[0])
    index = jnp.where(is_here, flat - first, 0)
    table = jax.lax.pcast(table, copied, to="varying")  # `_rows_of` has one gradient per device
    x = jnp.where(is_here[:, None], _rows_of(table, index, dtype), 0)
    if columns is not None:
        x = jax.lax.all_to_all(x, columns, split_axis=0, concat_axis=1, tiled=True)
    if rows is not None:
        x = jax.lax.psum(x, rows)
    return x.reshape(*tokens.shape, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_of(table: Array, index: Array, dtype: DTypeLike) -> Array:
    """Returns rows of a table. A row's gradient is summed in float32: in bfloat16 a sum stops at 256 equal terms."""
    return table[index].astype(dtype)


def _rows_of_forward(table: Array, index: Array, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return _rows_of(table, index, dtype), (table, index)


def _rows_of_backward(dtype: DTypeLike, kept: tuple[Array, Array], d_x: Array) -> tuple[Array, None]:
    del dtype
    table, index = kept
    total = jnp.zeros_like(table, jnp.float32).at[index].add(d_x.astype(jnp.float32))
    return total.astype(table.dtype), None


_rows_of.defvjp(_rows_of_forward, _rows_of_backward)
