"""A pytree of arrays in a file, in safetensors format: what learner and gradient helper give each other."""

import os
import pathlib
from typing import Any

import blake3
import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def write_tree(path: pathlib.Path, tree: Any) -> str:
    """Writes the arrays of a tree, whose shards are this process's, and returns the file's hash.

    The file appears whole, when its hash is known.
    """
    draft = path.with_suffix(".tmp")
    save_file({name: np.atleast_1d(np.asarray(leaf)) for name, leaf in _named(tree).items()}, draft)
    digest = hash_of(draft)
    os.replace(draft, path)
    return digest


def hash_of(path: pathlib.Path) -> str:
    """Returns the hash of a file; raises OSError if it cannot be read."""
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


def read_tree(path: pathlib.Path, like: Any) -> Any:
    """Returns the tree of a file in host memory; `like` has its structure and the number of dims of each array.

    Raises ValueError if the file has other arrays.
    """
    arrays, named = load_file(path), _named(like)
    _check_names(path, arrays, named)
    leaves = [arrays[name].reshape(()) if np.ndim(leaf) == 0 else arrays[name] for name, leaf in named.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_sharded(path: pathlib.Path, like: Any) -> Any:
    """Returns the tree of a file on the devices; each process of a mesh reads the rows of its own shards.

    The tree gets the shapes and shardings of `like`. Raises ValueError if the file has other arrays or other shapes.
    """
    named = _named(like)
    with safe_open(path, framework="np") as file:
        _check_names(path, dict.fromkeys(file.keys()), named)

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


def _check_names(path: pathlib.Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    if found.keys() != expected.keys():
        other = sorted(found.keys() ^ expected.keys())
        raise ValueError(f"{path}: expected the arrays of this run's model, got others: {', '.join(other[:3])}")


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
