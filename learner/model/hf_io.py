"""Hugging Face folders to parameters and back; safetensors only, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # registers bfloat16 with numpy, which safetensors needs
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bridge.names import check_same_names, flatten, is_stacked, unflatten
from learner.model.config import ModelConfig
from learner.model.decoder import Params, abstract_params

ShardingFn = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]
"""(Flax path, shape of the whole leaf) -> where it goes; None leaves it on the default device."""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt "
    "merges.txt tokenizer.model chat_template.jinja chat_template.json generation_config.json"
).split()


def load(
    folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None, sharding_fn: ShardingFn | None = None
) -> tuple[ModelConfig, Params]:
    """Reads a folder with config.json and safetensors, single or sharded with an index.

    With a `sharding_fn` each device's part is read from the file by itself, so no process ever holds a whole
    leaf of a sharded model.

    Args:
      folder: the folder.
      dtype: dtype of the parameters; None keeps the files'. The learner's master copy is float32.
      sharding_fn: see `ShardingFn`.

    Raises:
      FileNotFoundError: no folder, no config.json, no weights, or a file the index names is gone.
      ValueError: a config this decoder doesn't know; names, shapes or dtypes that don't fit it.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no model folder at {folder}")
    config = ModelConfig.from_hf(folder)
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        _check_tied_head(config, tensors, folder)
        check_same_names(f"{folder}: tensor", got=tensors, wanted=config.param_names.all_hf_names())
        leaves = {}
        for path, spec in flatten(abstract_params(config)).items():
            rows = [tensors[name] for name in config.param_names.hf_names(path)]
            for row in rows:
                row.check(spec.shape[1:] if is_stacked(path) else spec.shape)
            found = {row.dtype for row in rows}
            if dtype is None and len(found) > 1:
                raise ValueError(f"{path}: layers of different dtypes {found}; give load a dtype")
            target = np.dtype(found.pop() if dtype is None else dtype)
            sharding = sharding_fn(path, spec.shape) if sharding_fn is not None else None
            leaves[path] = _make_leaf(path, rows, spec.shape, target, sharding)
    return config, unflatten(leaves)


def save(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Writes config.json and safetensors that transformers and vLLM load.

    Everything goes to a temporary folder beside it, is flushed, and is renamed: `folder` is whole or absent.

    Args:
      folder: where to; must not exist, or be empty.
      config: the model.
      params: its parameters, each fully addressable from this process (gather a multi-host model first).
      dtype: dtype of the tensors; None keeps the parameters'.
      tokenizer_from: a folder whose tokenizer files are copied along.
      max_shard_bytes: weights above this are split over several files with an index.

    Raises:
      FileExistsError: `folder` has something in it.
      FileNotFoundError: `tokenizer_from` isn't a folder.
      ValueError: parameters that don't fit the config, or live on other hosts too.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and isn't empty; save to a new folder")
    if tokenizer_from is not None and not pathlib.Path(tokenizer_from).is_dir():
        raise FileNotFoundError(f"no tokenizer folder at {tokenizer_from}")
    leaves = flatten(params)
    _check_leaves(config, leaves)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        out_config = config.to_hf()
        # Readers such as vLLM pick their dtype from here; transformers 4 calls it torch_dtype.
        out_dtype = str(np.dtype(dtype or leaves["embed/embedding"].dtype))
        out_config |= {key: out_dtype for key in ("dtype", "torch_dtype") if key in out_config}
        _write_json(temporary / "config.json", out_config)
        _write_weights(temporary, config, leaves, dtype, max_shard_bytes)
        for name in _TOKENIZER_FILES if tokenizer_from is not None else ():
            source = pathlib.Path(tokenizer_from or "") / name
            if source.is_file():
                shutil.copyfile(source, temporary / name)
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Tensor:
    """One tensor in an open safetensors file; read only where it is indexed."""

    def __init__(self, file: Any, name: str, where: pathlib.Path):
        self._slice, self._what = file.get_slice(name), f"{where}: {name}"
        found = self._slice.get_dtype()
        if found not in _DTYPES:
            raise ValueError(f"{self._what}: got dtype {found}, wanted one of {list(_DTYPES)}")
        self.dtype = _DTYPES[found]

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor has another shape."""
        if tuple(self._slice.get_shape()) != shape:
            raise ValueError(f"{self._what}: got shape {self._slice.get_shape()}, wanted {list(shape)}")

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._slice[index]


def _open_tensors(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _Tensor]:
    listed: dict[str, str] = {}
    if (folder / _INDEX).is_file():
        listed = json.loads((folder / _INDEX).read_text(encoding="utf-8")).get("weight_map", {})
        files = sorted(set(listed.values()))
    else:
        files = [_WEIGHTS]
    tensors: dict[str, _Tensor] = {}
    for file_name in files:
        path = folder / file_name
        if path.parent != folder or not path.is_file():
            raise FileNotFoundError(f"no weights at {path} (wanted {_WEIGHTS}, or {_INDEX} and its files)")
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            if listed and listed.get(name) != file_name:
                raise ValueError(f"{path} holds {name}, which {_INDEX} puts in {listed.get(name)}")
            tensors[name] = _Tensor(file, name, path)
    check_same_names(f"{folder}: indexed tensor", got=tensors, wanted=tuple(listed or tensors))
    return tensors


def _check_tied_head(config: ModelConfig, tensors: dict[str, _Tensor], folder: pathlib.Path) -> None:
    """Drops the copy of the embedding that some writers add as a tied model's head, if it is a copy."""
    if not config.tie_word_embeddings or "lm_head.weight" not in tensors:
        return
    head, embedding = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if embedding is None:
        return  # reported as missing by the caller
    for tensor in (head, embedding):
        tensor.check((config.vocab_size, config.hidden_size))
    if head.dtype != embedding.dtype or not np.array_equal(head[:, :], embedding[:, :]):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but lm_head.weight isn't model.embed_tokens.weight")


def _make_leaf(path: str, rows: list[_Tensor], shape, dtype: np.dtype, sharding) -> jax.Array:
    def read(index: Any) -> np.ndarray:
        if not is_stacked(path):
            return np.asarray(rows[0][index]).astype(dtype, copy=False)
        part = np.empty([len(range(*s.indices(d))) for s, d in zip(index, shape, strict=True)], dtype)
        for i, row in enumerate(rows[index[0]]):
            part[i] = row[index[1:]]
        return part

    if sharding is None:
        return jnp.asarray(read(tuple(slice(0, d) for d in shape)))
    return jax.make_array_from_callback(shape, sharding, read)


def _check_leaves(config: ModelConfig, leaves: Mapping[str, Any]) -> None:
    check_same_names("parameter", got=leaves, wanted=config.param_names.paths())
    for path, spec in flatten(abstract_params(config)).items():
        if leaves[path].shape != spec.shape:
            raise ValueError(f"{path}: got shape {leaves[path].shape}, wanted {spec.shape}")
        if not getattr(leaves[path], "is_fully_addressable", True):
            raise ValueError(f"{path} is spread over several hosts; gather it before save")


def _write_weights(folder: pathlib.Path, config: ModelConfig, leaves, dtype, max_shard_bytes: int) -> None:
    sizes = {p: x.size * np.dtype(dtype or x.dtype).itemsize for p, x in leaves.items()}
    names, shards, filled = config.param_names, [[]], 0
    for path in names.paths():
        for name in names.hf_names(path):
            size = sizes[path] // (config.num_layers if is_stacked(path) else 1)
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
    tensors, weight_map = _host_tensors(config, leaves, dtype), {}
    for i, shard in enumerate(shards):
        file_name = _WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        arrays = {}
        for wanted in shard:
            name, array = next(tensors)
            assert name == wanted, (name, wanted)
            arrays[name] = array
        save_file(arrays, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / _INDEX, {"metadata": total, "weight_map": weight_map})


def _host_tensors(config: ModelConfig, leaves, dtype) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array) in order, one leaf on the host at a time."""
    for path in config.param_names.paths():
        array = np.asarray(leaves[path])
        array = np.ascontiguousarray(array if dtype is None else array.astype(dtype, copy=False))
        for layer, name in enumerate(config.param_names.hf_names(path)):
            yield name, array[layer] if is_stacked(path) else array


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
