"""A partial gradient in a file: the accumulator of a helper, which the learner adds to its own.

The arrays are float32, in safetensors format. Every process of the learner maps the file and reads the rows of its own
shards.
"""

import os
import pathlib

import blake3
import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from learner.update.optimizer import Accumulator


def write_partial_gradient(path: pathlib.Path, accumulator: Accumulator) -> str:
    """Writes an accumulator, whose shards are this process's, and returns the file's hash."""
    leaves = {name: np.atleast_1d(np.asarray(leaf)) for name, leaf in _named(accumulator).items()}
    draft = path.with_suffix(".tmp")
    save_file(leaves, draft)
    os.replace(draft, path)
    return hash_of(path)


def hash_of(path: pathlib.Path) -> str:
    """Returns the hash of a file; raises OSError if it cannot be read."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def read_partial_gradient(path: pathlib.Path, like: Accumulator) -> Accumulator:
    """Returns the accumulator of a file on the devices.

    Args:
      path: file of `write_partial_gradient`.
      like: an accumulator of the learner, or its shapes with shardings.

    Raises:
      ValueError: the file is of another model.
    """
    named = _named(like)
    with safe_open(path, framework="np") as file:
        if set(file.keys()) != named.keys():
            raise ValueError(f"{path}: expected the arrays of this model's accumulator, got others")

        def read(name: str, leaf: jax.Array) -> jax.Array:
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != (leaf.shape or (1,)):
                raise ValueError(f"{path}: {name}: expected shape {leaf.shape}, got {stored.get_shape()}")
            whole = None if leaf.shape else stored[:].reshape(())
            return jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index: stored[index] if whole is None else whole
            )

        leaves = [read(name, leaf) for name, leaf in named.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(accumulator: Accumulator) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(accumulator)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
