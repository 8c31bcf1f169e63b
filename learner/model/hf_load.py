"""Loading of parameters from Hugging Face folders; safetensors only. `save` is the inverse.

Each process reads only the bytes that its devices hold. Each leaf is filled in place on its device, one piece of a
Hugging Face tensor at a time. A host's memory therefore holds only one piece, plus the parameters if its devices are
CPUs. Files are memory-mapped, and the system can drop their pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike
from safetensors import SafetensorError, safe_open

from bridge.param_names import check_same_names, flatten, unflatten
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params
from learner.model.hf_save import INDEX, WEIGHTS, save

__all__ = ["ShardingFn", "load", "open_folder", "params_of", "save"]

ShardingFn = Callable[[str, tuple[int, ...]], Sharding | None]
"""Returns the sharding of a leaf from (Flax path, global shape); None means the default device."""

_PIECE_BYTES = 2**22
"""Size of a piece: small enough for the allocator to reuse its memory, large enough to keep an accelerator's link
busy."""
Device = Any
"""`jax.Device`, which type checkers treat as a variable."""
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Tensor of an open file."""

    what: str
    """File and tensor name, for messages."""
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]
    """Reads a slice (step 1 along each dim) and no other bytes of the file."""


def load(
    folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None, sharding_fn: ShardingFn | None = None
) -> tuple[Architecture, Params]:
    """Reads a folder with config.json and safetensors, a single file or several with an index.

    Every process of a multi-host mesh reads the folder. With `dtype` None the parameters keep the files' dtype. Raises
    FileNotFoundError if the folder, config.json, the weights or a file in the index is missing, and ValueError if the
    config is unsupported, or if tensor names, shapes or dtypes do not match it.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no model folder at {folder}")
    config = Architecture.from_hf(folder)
    with open_folder(folder) as tensors:
        _check_tied_head(config, tensors, folder)
        check_same_names(f"{folder}: tensor", got=tensors, wanted=config.param_names.all_hf_names())
        return config, params_of(tensors, config, dtype=dtype, sharding_fn=sharding_fn)


def params_of(
    tensors: Mapping[str, StoredTensor],
    config: Architecture,
    *,
    dtype: DTypeLike | None = None,
    sharding_fn: ShardingFn | None = None,
) -> Params:
    """Returns the parameters from tensors by their Hugging Face names; arguments and ValueError are as in `load`."""
    names = config.param_names
    leaves = {}
    for path, spec in flatten(abstract_params(config)).items():
        stack_shape = names.stack(path)
        parts = [tensors[name] for name in names.hf_names(path)]
        for part in parts:
            _check_shape(part, spec.shape[len(stack_shape) :])
        found = {part.dtype for part in parts}
        if dtype is None and len(found) > 1:
            raise ValueError(f"{path}: layers of different dtypes {found}; give load a dtype")
        target = np.dtype(found.pop() if dtype is None else dtype)
        sharding = sharding_fn(path, spec.shape) if sharding_fn is not None else None
        leaves[path] = _make_leaf(parts, stack_shape, spec.shape, target, sharding)
    return unflatten(leaves)


@contextlib.contextmanager
def open_folder(folder: pathlib.Path) -> Iterator[dict[str, StoredTensor]]:
    """Yields the folder's tensors by name, readable inside the context.

    Raises FileNotFoundError if the weights or a file in the index is missing, and ValueError if a file is not complete
    safetensors, or contradicts the index.
    """
    with contextlib.ExitStack() as stack:
        yield _open_files(folder, stack)


def _open_files(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    listed: dict[str, str] = {}
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map", {})
        files = sorted(set(listed.values()))
    else:
        files = [WEIGHTS]
    tensors: dict[str, StoredTensor] = {}
    for file_name in files:
        path = folder / file_name
        if path.parent != folder or not path.is_file():
            raise FileNotFoundError(f"no weights at {path} (expected {WEIGHTS}, or {INDEX} and its files)")
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except SafetensorError as e:
            raise ValueError(f"{path} is not a whole safetensors file: {e}") from e
        for name in file.keys():  # noqa: SIM118  # the file is not a mapping
            if listed and listed.get(name) != file_name:
                raise ValueError(f"{path} holds {name}, which {INDEX} puts in {listed.get(name)}")
            stored = file.get_slice(name)
            if stored.get_dtype() not in DTYPES:
                raise ValueError(f"{path}: {name}: expected dtype of {list(DTYPES)}, got {stored.get_dtype()}")
            tensors[name] = StoredTensor(
                what=f"{path}: {name}",
                shape=tuple(stored.get_shape()),
                dtype=DTYPES[stored.get_dtype()],
                read=stored.__getitem__,
            )
    check_same_names(f"{folder}: indexed tensor", got=tensors, wanted=tuple(listed or tensors))
    return tensors


def _check_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{tensor.what}: expected shape {list(shape)}, got {list(tensor.shape)}")


def _check_tied_head(config: Architecture, tensors: dict[str, StoredTensor], folder: pathlib.Path) -> None:
    """Drops a tied model's redundant head; raises ValueError if it is not a copy of the embedding."""
    if not config.tie_word_embeddings or "lm_head.weight" not in tensors:
        return
    head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if embedding is None:
        return  # reported as missing by the caller
    for tensor in (head, embedding):
        _check_shape(tensor, (config.vocab_size, config.hidden_size))
    pieces = _pieces(tuple(slice(0, d) for d in head.shape), head.shape, head.dtype)
    same = head.dtype == embedding.dtype
    if not same or not all(np.array_equal(head.read(index), embedding.read(index)) for index in pieces):
        raise ValueError(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"
        )


def _make_leaf(
    parts: list[StoredTensor],
    stack: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    """Returns the leaf `[*stack, *tensor]`, of which this process fills the shards of its devices."""
    whole = tuple(slice(0, d) for d in shape)
    places = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(shape)
    holders: dict[tuple[tuple[int, int], ...], list[Device | None]] = {}
    for device, index in places.items():
        bounds = tuple(s.indices(d)[:2] for s, d in zip(index or whole, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    filled: dict[Device | None, jax.Array] = {}
    for bounds, devices in holders.items():
        local = tuple(stop - start for start, stop in bounds)
        for device in devices:
            filled[device] = _zeros(local, dtype, device)
        index = tuple(slice(*b) for b in bounds)
        for where in itertools.product(*(range(*b) for b in bounds[: len(stack)])):
            tensor = parts[int(np.ravel_multi_index(where, stack)) if stack else 0]
            for piece in _pieces(index[len(stack) :], tensor.shape, tensor.dtype):
                read = tensor.read(piece)
                at = [p.start - b[0] for p, b in zip((*(slice(i, i + 1) for i in where), *piece), bounds, strict=True)]
                for device in devices:
                    value = jnp.asarray(read) if device is None else jax.device_put(read, device)
                    filled[device] = _fill(filled[device], value, at)
                # Transfers are asynchronous: without this all pieces of a leaf would queue in host memory.
                jax.block_until_ready([filled[device] for device in devices])
    if sharding is None:
        return filled[None]
    return jax.make_array_from_single_device_arrays(shape, sharding, list(filled.values()), dtype=dtype)


def _pieces(index: tuple[slice, ...], shape: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[slice, ...]]:
    """Splits a slice of a tensor along its first dim into pieces of about `_PIECE_BYTES`."""
    bounds = [s.indices(d)[:2] for s, d in zip(index, shape, strict=True)]
    row_bytes = math.prod(stop - start for start, stop in bounds[1:]) * dtype.itemsize
    step, (top, bottom) = max(_PIECE_BYTES // max(row_bytes, 1), 1), bounds[0]
    for start in range(top, bottom, step):
        yield slice(start, min(start + step, bottom)), *(slice(*b) for b in bounds[1:])


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: Device | None) -> jax.Array:
    if device is None:
        return jnp.zeros(shape, dtype)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))()


@functools.partial(jax.jit, donate_argnums=0)
def _fill(leaf: jax.Array, piece: jax.Array, at: list[ArrayLike]) -> jax.Array:
    """Writes the cast piece into the leaf in place at an offset; missing leading dims count as 1."""
    return jax.lax.dynamic_update_slice(
        leaf, jax.lax.expand_dims(piece, range(leaf.ndim - piece.ndim)).astype(leaf.dtype), at
    )
