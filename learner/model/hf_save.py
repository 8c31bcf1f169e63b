"""Saving of parameters to Hugging Face folders that transformers and vLLM load.

The host holds the tensors of one file at a time. If parameters span hosts, all processes iterate over the tensors
together: each tensor is gathered briefly, and the process that owns its file writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from safetensors.numpy import save_file

from bridge.files import flush
from bridge.param_names import check_same_names, flatten
from bridge.text.template_files import FOLDER as TEMPLATES
from learner.model.architecture import Architecture
from learner.model.decoder import Params, abstract_params

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
_TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "generation_config.json",
]


def save(
    folder: str | os.PathLike[str],
    config: Architecture,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 1000**3,
) -> None:
    """Writes config.json and safetensors, and copies the tokenizer files of the folder `tokenizer_from`.

    Files are written and flushed in a temporary folder next to `folder`, which is then renamed: `folder` is complete or
    absent. If parameters span hosts, every process calls this with the same arguments and a shared folder, and writes
    every num_processes-th file. With `dtype` None the tensors have the parameters' dtype. Weights above
    `max_shard_bytes` are split over several files with an index.

    Raises FileExistsError if `folder` is not empty, FileNotFoundError if `tokenizer_from` is not a folder, and
    ValueError if the parameters do not match the config.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; save to a new folder")
    if tokenizer_from is not None and not pathlib.Path(tokenizer_from).is_dir():
        raise FileNotFoundError(f"no tokenizer folder at {tokenizer_from}")
    leaves = flatten(params)
    _check_leaves(config, leaves)
    writers = _Writers.of(leaves)
    temporary = folder.with_name(f".{folder.name}.tmp-{writers.token}")
    if writers.is_first:
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with the same pid, as in a container
        temporary.mkdir(parents=True)
    writers.wait("made")
    try:
        _write_weights(temporary, config, leaves, dtype, max_shard_bytes, writers)
        writers.wait("written")
        if writers.is_first:
            _write_the_rest(temporary, config, dtype or leaves["embed/embedding"].dtype, tokenizer_from)
            temporary.rename(folder)
            flush(folder.parent)
    except BaseException:
        if writers.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    writers.wait("renamed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Writers:
    """Processes that write together: one, or all of a multi-host mesh."""

    index: int
    count: int
    token: int
    """Number that distinguishes this save from an earlier failed one; equal in all processes."""

    @classmethod
    def of(cls, leaves: Mapping[str, Any]) -> _Writers:
        """Returns all processes if any leaf spans them, otherwise this process alone."""
        if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves.values()):
            return cls(index=0, count=1, token=os.getpid())
        token = int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))
        return cls(index=jax.process_index(), count=jax.process_count(), token=token)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def wait(self, until: str) -> None:
        if self.count > 1:
            multihost_utils.sync_global_devices(f"learner.model.hf_save {self.token} {until}")


def _check_leaves(config: Architecture, leaves: Mapping[str, Any]) -> None:
    check_same_names("parameter", got=leaves, wanted=config.param_names.paths())
    for path, spec in flatten(abstract_params(config)).items():
        if leaves[path].shape != spec.shape:
            raise ValueError(f"{path}: expected shape {spec.shape}, got {leaves[path].shape}")
        if np.dtype(leaves[path].dtype) not in _DTYPES:
            raise ValueError(f"{path}: expected dtype of {[str(d) for d in _DTYPES]}, got {leaves[path].dtype}")


def _write_weights(
    folder: pathlib.Path, config: Architecture, leaves, dtype, max_shard_bytes: int, writers: _Writers
) -> None:
    specs = _specs(config, leaves, dtype)
    files: list[list[str]] = [[]]
    filled = total_bytes = 0
    for name, spec in specs.items():
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        if files[-1] and filled + num_bytes > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += num_bytes
        total_bytes += num_bytes
    weight_map = {}
    for i, names in enumerate(files):
        file_name = WEIGHTS if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(names, file_name)
        arrays = _host_tensors(config, leaves, names, specs)
        if i % writers.count == writers.index:
            save_file(dict(zip(names, arrays, strict=True)), folder / file_name, metadata={"format": "pt"})
            flush(folder / file_name)
        else:
            for _ in arrays:  # the gathers are collective
                pass
    if len(files) > 1 and writers.is_first:
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _specs(config: Architecture, leaves: Mapping[str, Any], dtype: DTypeLike | None) -> dict[str, jax.ShapeDtypeStruct]:
    specs = {}
    for path in config.param_names.paths():
        leaf, num_stacked = leaves[path], len(config.param_names.stack(path))
        spec = jax.ShapeDtypeStruct(leaf.shape[num_stacked:], np.dtype(leaf.dtype if dtype is None else dtype))
        specs |= dict.fromkeys(config.param_names.hf_names(path), spec)
    return specs


def _host_tensors(
    config: Architecture, leaves: Mapping[str, Any], names: list[str], specs: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[np.ndarray]:
    for name in names:
        path, index = config.param_names.locate(name)
        leaf, dtype = leaves[path], specs[name].dtype
        if not isinstance(leaf, jax.Array):
            yield np.asarray(leaf[index]).astype(dtype, copy=False)
        elif leaf.is_fully_addressable:
            yield np.asarray(_slice(None)(leaf, index, dtype))
        else:
            # The tensor is gathered over hosts, then read from one local device.
            yield np.asarray(_slice(leaf.sharding.mesh)(leaf, index, dtype).addressable_data(0))  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _slice(mesh: jax.sharding.Mesh | None):
    """Returns jitted `leaf[index]` cast to a dtype, replicated over the mesh if one is given."""

    def one(leaf: jax.Array, index: tuple[ArrayLike, ...], dtype: np.dtype) -> jax.Array:
        for i in index:
            leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
        return leaf.astype(dtype)

    out = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(one, static_argnums=2, out_shardings=out)


def _write_the_rest(
    folder: pathlib.Path, config: Architecture, dtype: DTypeLike, tokenizer_from: str | os.PathLike[str] | None
) -> None:
    out_config = json.loads(config.hf_json)
    # vLLM and others read the dtype from here; transformers 4 calls it torch_dtype.
    out_config |= {key: str(np.dtype(dtype)) for key in ("dtype", "torch_dtype") if key in out_config}
    _write_json(folder / "config.json", out_config)
    for name in _TOKENIZER_FILES if tokenizer_from is not None else ():
        source = pathlib.Path(tokenizer_from or "") / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
            flush(folder / name)
    templates = pathlib.Path(tokenizer_from or "") / TEMPLATES
    for source in sorted(templates.glob("*.jinja")) if tokenizer_from is not None else ():
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(source, folder / TEMPLATES / source.name)
        flush(folder / TEMPLATES / source.name)
    flush(folder)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    flush(path)
