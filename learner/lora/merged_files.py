"""The merged model that a run leaves, W + s B A, on the base as its files have it.

On the devices the base is as wide as what it is multiplied or served in. Where its files are wider, what it lost there
isn't in the exported model: that is the one that the exported adapters make of the base.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.typing import DTypeLike

from bridge.adapter_names import A, B
from bridge.names import flatten, unflatten
from bridge.weights_digest import weights_digest
from learner.lora.adapters import merge
from learner.lora.base import Base
from learner.model.config import Architecture
from learner.model.decoder import Params, abstract_params
from learner.model.hf import io as hf_io
from learner.model.hf.safetensors_file import StoredTensor


@contextlib.contextmanager
def merged(
    base: Base,
    adapters: Params,
    on_host: Params,
    architecture: Architecture,
    *,
    scale: float,
    dtype: DTypeLike,
) -> Iterator[Params]:
    """The merged parameters, for `hf.save`, whose tensors are of `dtype`; of use while it is open.

    Args:
      base: the frozen one.
      adapters: on the devices.
      on_host: the same there, whole, in every process.
      architecture: the model's.
      scale: s.
      dtype: of what is added to.

    Raises:
      ValueError: the base's files are to be read again, and aren't what they were when the learner started.
    """
    if not base.is_rounded:
        yield merge(base.params, adapters, scale=scale, dtype=dtype)
        return
    _check_unchanged(base)
    with hf_io.open_folder(base.folder) as tensors:
        yield _of_files(tensors, on_host, architecture, scale=scale)


def _check_unchanged(base: Base) -> None:
    found = weights_digest(base.folder)
    if found != base.books["base"]:
        raise ValueError(
            f"the weights in {base.folder} have changed since the learner started (they hashed to "
            f"{base.books['base']}, now to {found}), so the adapters can't be merged with them: bring them back and "
            "start again; the last checkpoint has the adapters"
        )


def _of_files(
    tensors: Mapping[str, StoredTensor], adapters: Params, architecture: Architecture, *, scale: float
) -> Params:
    names, parts = architecture.param_names, flatten(adapters)
    leaves: dict[str, FileLeaf] = {}
    for path, spec in flatten(abstract_params(architecture)).items():
        module = path.rpartition("/")[0]
        pair = [np.asarray(parts[f"{module}/{x}"], np.float32) for x in (A, B) if f"{module}/{x}" in parts]
        a, b = pair if pair and path.endswith("/kernel") else (None, None)
        leaves[path] = FileLeaf(
            tensors=tuple(tensors[name] for name in names.hf_names(path)),
            stack=names.stack(path),
            shape=spec.shape,
            a=a,
            b=b,
            scale=scale,
        )
    return unflatten(leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileLeaf:
    """A leaf as `hf.save` reads it, one Hugging Face tensor at a time, of the base's files and the adapters."""

    tensors: tuple[StoredTensor, ...]
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    a: np.ndarray | None
    """[layers, rank, in]; None where there is no adapter."""
    b: np.ndarray | None
    """[layers, out, rank]."""
    scale: float

    @property
    def dtype(self) -> np.dtype:
        """What a tensor is read in."""
        return np.dtype(np.float32)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether one process writes all files; of several each has all of the leaf, and they share the files out."""
        return jax.process_count() == 1

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        """The tensor at that place of the stack, in float32."""
        tensor = self.tensors[int(np.ravel_multi_index(index, self.stack)) if index else 0]
        read = tensor.read(tuple(slice(0, size) for size in tensor.spec.shape)).astype(np.float32)
        if self.a is not None and self.b is not None:
            read += self.scale * (self.b[index] @ self.a[index])
        return read
