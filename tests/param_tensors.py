"""The tensors of a model's Hugging Face checkpoint, sliced out of its stacked leaves."""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.param_names import ParamNames


def iter_tensors(names: ParamNames, leaves: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (Hugging Face name, whole leaf or its slice) of leaves by path, stacked by layer and expert."""
    for path in names.paths():
        tensors = [leaves[path]]
        for _ in names.stack(path):
            tensors = [part for tensor in tensors for part in (tensor[i] for i in range(len(tensor)))]
        yield from zip(names.hf_names(path), tensors, strict=True)
