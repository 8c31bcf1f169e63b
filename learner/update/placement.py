"""What the jitted steps take and return: shapes, and where on the mesh each array lies."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes, each with its sharding."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def shardings(tree: Any) -> Any:
    """Those of a tree of arrays, or of `placed` shapes."""
    return jax.tree.map(lambda x: x.sharding, tree)


def put(x: "np.ndarray | OwnShards | Array", sharding: NamedSharding) -> Array:
    """Spreads an array over the mesh, unless it is there already; every process has the same one, or its own parts."""
    if isinstance(x, jax.Array):
        return x
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


class OwnShards:
    """The parts of a global array that are this process's, on the host."""

    def __init__(self, x: Array) -> None:
        """Waits for the array."""
        self.shape, self.dtype = x.shape, x.dtype
        self._parts = {_place(shard.index, x.shape): np.asarray(shard.data) for shard in x.addressable_shards}

    def __getitem__(self, index: Any) -> np.ndarray:
        """The part at a place of the sharding that the array had."""
        return self._parts[_place(index, self.shape)]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self._parts.values())


def own_on_host(x: np.ndarray | OwnShards | Array) -> np.ndarray | OwnShards:
    """An array in host memory; of one that is spread over processes, this one's parts. `put` takes it back."""
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if x.is_fully_addressable else OwnShards(x)


def whole_on_host(x: Array) -> np.ndarray:
    """An array in host memory; all processes together gather one that is spread over them."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    assert isinstance(x.sharding, NamedSharding)
    return np.asarray(_gather(x.sharding.mesh)(x))


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _place(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A part's place as what can be compared: first and one past the last of each dim."""
    return tuple(slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True))
