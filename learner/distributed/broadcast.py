"""A batch from the leader's memory onto the devices of all processes, each of which gets what its own rows need.

Its shapes are fixed, so it goes the way of a gradient, over the devices' own links, in a program that is compiled once:
one device of the leader holds the batch and all others zeros, and each is handed its shard of the sum. Summed are the
bits, as whole numbers: so a NaN keeps its payload, and -0.0 + 0.0 its sign. Nothing here waits for a device: the
program runs while the host goes on to the step, and frees what it needed: on each device up to twice the whole batch.

(JAX's `broadcast_one_to_all` adds floats, hands all to everyone, and waits for the devices.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from learner.distributed.sharding import shardings


class BatchBroadcast:
    """Spreads trees of one kind over one mesh. All processes call it, in the order in which they call the steps."""

    def __init__(self, shapes: Any, mesh: Mesh, *, leader: int = 0) -> None:
        """Compiles nothing yet.

        Args:
          shapes: of the whole arrays, each with its sharding over the mesh (`placement.placed`).
          mesh: of devices of all processes; of each as many as there are, in any order.
          leader: the process that has the arrays.
        """
        self._shapes = shapes
        first = next(device for device in mesh.devices.flat if device.process_index == leader)
        self._source = first if leader == jax.process_index() else None
        self._axes = mesh.axis_names
        self._apart = NamedSharding(mesh, PartitionSpec(self._axes))
        """Of what is summed: a whole array for each device."""
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), _bits(x.dtype)), shapes),
            out_shardings=self._apart,
        )
        self._sum = jax.jit(
            jax.shard_map(
                lambda tree: jax.tree.map(self._own_shard, tree, shapes),
                mesh=mesh,
                in_specs=PartitionSpec(self._axes),
                out_specs=jax.tree.map(lambda sharding: sharding.spec, shardings(shapes)),
            )
        )

    def __call__(self, tree: Any) -> Any:
        """The leader's arrays, spread.

        Args:
          tree: the leader's, on the host; what other processes pass is not read.

        Raises:
          ValueError: an array has another shape or dtype than all have agreed on.
        """
        summed = self._zeros()
        if self._source is not None:
            summed = jax.tree.map(self._with, summed, tree, self._shapes)
        return self._sum(summed)

    def _with(self, zeros: Array, x: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
        """The zeros, in one device's place the array."""
        if x.shape != shape.shape or x.dtype != shape.dtype:
            raise ValueError(f"an array to spread is {x.dtype}{x.shape}, wanted {shape.dtype}{shape.shape}")
        bits = np.ascontiguousarray(x).reshape(1, *x.shape).view(_bits(x.dtype))
        parts = [
            jax.device_put(bits, self._source) if shard.device == self._source else shard.data
            for shard in zeros.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(zeros.shape, self._apart, parts)

    def _own_shard(self, x: Array, shape: jax.ShapeDtypeStruct) -> Array:
        """On one device: of the sum over all, its shard."""
        assert isinstance(shape.sharding, NamedSharding)
        total, left = x[0], set(self._axes)
        for dim, axes in enumerate(shape.sharding.spec):
            if axes is not None:
                total = jax.lax.psum_scatter(total, axes, scatter_dimension=dim, tiled=True)
                left -= {axes} if isinstance(axes, str) else set(axes)
        total = jax.lax.psum(total, tuple(axis for axis in self._axes if axis in left))
        if shape.dtype == jnp.bool_:
            return total != 0
        return jax.lax.bitcast_convert_type(total, shape.dtype)


@functools.cache
def _bits(dtype: Any) -> np.dtype:
    """Whole numbers as wide."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")
