"""Arrays that move between the devices and host memory, so that others can use the devices' memory meanwhile."""

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """A pytree in host memory, and where its arrays were."""

    tree: Any
    """The same structure with numpy arrays."""
    shardings: Any


def to_host(tree: Any) -> Offloaded:
    """Copies the arrays of a pytree to host memory and frees their devices' memory; every shard must be addressable.

    An array that the tree has twice stays one array.
    """
    leaves, structure = jax.tree.flatten(tree)
    copies = {id(leaf): np.array(leaf) for leaf in leaves}
    offloaded = Offloaded(
        jax.tree.unflatten(structure, [copies[id(leaf)] for leaf in leaves]),
        jax.tree.unflatten(structure, [leaf.sharding for leaf in leaves]),
    )
    for leaf in leaves:
        leaf.delete()
    return offloaded


def to_device(offloaded: Offloaded) -> Any:
    """Returns the pytree on the devices it came from."""
    leaves, structure = jax.tree.flatten(offloaded.tree)
    shardings = jax.tree.leaves(offloaded.shardings)
    placed: dict[int, jax.Array] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if id(leaf) not in placed:
            placed[id(leaf)] = jax.device_put(leaf, sharding)
    return jax.tree.unflatten(structure, [placed[id(leaf)] for leaf in leaves])
