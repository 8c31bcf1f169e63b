"""Device broadcast of a batch from the leader's memory; each process receives only the shards of its rows.

Shapes are fixed, so the broadcast is a program that is compiled once and runs over device links. One leader device
holds the batch, all others hold zeros, and each device receives its shard of the sum. The sum is over the bits as
integers, so NaN payloads and -0.0 are preserved. The host never waits for a device: the program runs while the host
prepares the step. It temporarily needs up to twice the whole batch per device. (JAX's `broadcast_one_to_all` adds
floats, gives every process the whole batch, and waits for the devices.)
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
    """Broadcast of trees of one structure over one mesh. All processes call it in the same order relative to steps."""

    def __init__(self, shapes: Any, mesh: Mesh, *, leader: int = 0) -> None:
        """Builds the programs; the first call compiles them.

        Args:
          shapes: shapes of the global arrays, with shardings over the mesh (`sharding.placed`).
          mesh: devices of all processes, the same number of each, in any order.
          leader: index of the process that has the arrays.
        """
        self._shapes = shapes
        first = next(device for device in mesh.devices.flat if device.process_index == leader)
        self._source = first if leader == jax.process_index() else None
        self._axes = mesh.axis_names
        self._apart = NamedSharding(mesh, PartitionSpec(self._axes))
        """Sharding of the summands: one whole array per device."""
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
        """Returns the leader's arrays, sharded over the mesh.

        Args:
          tree: the leader's host arrays; ignored in other processes.

        Raises:
          ValueError: an array differs from the agreed shape or dtype.
        """
        summed = self._zeros()
        if self._source is not None:
            summed = jax.tree.map(self._with, summed, tree, self._shapes)
        return self._sum(summed)

    def _with(self, zeros: Array, x: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
        """Returns the zeros with the array in the slot of the leader's device."""
        if x.shape != shape.shape or x.dtype != shape.dtype:
            raise ValueError(f"an array to spread is {x.dtype}{x.shape}, wanted {shape.dtype}{shape.shape}")
        bits = np.ascontiguousarray(x).reshape(1, *x.shape).view(_bits(x.dtype))
        parts = [
            jax.device_put(bits, self._source) if shard.device == self._source else shard.data
            for shard in zeros.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(zeros.shape, self._apart, parts)

    def _own_shard(self, x: Array, shape: jax.ShapeDtypeStruct) -> Array:
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
    return np.dtype(f"u{np.dtype(dtype).itemsize}")
