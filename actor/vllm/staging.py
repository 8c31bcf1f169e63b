"""Staging: prepares a snapshot concurrently with generation, so that the pause only swaps it in.

On a CPU most of a load is vLLM's work on its own memory: joining fused matrices (q, k, v; gate, up), packing each
matrix for oneDNN, and page faults of both. None of it needs the served tensors. So vLLM's loading code runs on a
**twin** of the model: modules of the same classes and attributes with new parameters. In the pause the twin's packed
kernels replace the served ones. Unpacked tensors (embeddings, norms, biases) are copied into the served parameters,
whose addresses stay.

Only layers with known loading effects are staged: plain linear layers, embeddings, heads, and modules with parameters
but without a quantization method. A MoE's experts load in the pause. The whole model loads in the pause if it has any
other layer, is on an accelerator (no memory for a second copy), or if memory is short.
"""

import dataclasses
import logging
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from actor.vllm.verify_weights import expert_prefixes, has_experts

_KERNEL = "cpu_linear"
"""Attribute in which vLLM keeps a layer's kernel with its packed matrix."""
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_SPARE = 1.25
"""Factor of free memory required over the size of the staged tensors."""

logger = logging.getLogger(f"vllm.{__name__}")


class NotStageableError(Exception):
    """The whole model must be loaded in the pause, for the given reason."""


class StagingStoppedError(Exception):
    """Staging was stopped, because the snapshot is no longer needed."""


@dataclasses.dataclass(kw_only=True)
class Staged:
    """Staged snapshot that `serve` swaps in."""

    pairs: list[tuple[Any, Any]]
    """Served modules and their twins."""
    left: frozenset[str]
    """Names of the snapshot's tensors that are not staged."""

    @torch.no_grad()
    def serve(self) -> list[Any]:
        """Swaps the twins' kernels and values into the served modules; returns the retired kernels.

        Freeing the retired kernels returns gigabytes to the kernel: drop them after generation has resumed.
        """
        retired = []
        for layer, twin in self.pairs:
            if _KERNEL in vars(twin):
                retired.append(getattr(layer, _KERNEL, None))
                setattr(layer, _KERNEL, getattr(twin, _KERNEL))
        for served, new in _distinct(self.pairs):
            served.data.copy_(new.data)
        return retired


def stage(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], stopped: threading.Event) -> Staged:
    """Loads a snapshot into a twin of the model with vLLM's own code; reads the model only.

    Raises NotStageableError if the snapshot must be loaded in the pause, and StagingStoppedError if `stopped` was set.
    """
    check_stageable(model)
    left = frozenset(name for name in tensors if name.startswith(expert_prefixes(model)))
    check_memory(sum(t.nbytes for name, t in tensors.items() if name not in left))
    twins = _ShadowModel()
    try:
        with torch.no_grad():
            twin: Any = twins.of(model)
            twin.load_weights(_until(stopped, ((n, t) for n, t in tensors.items() if n not in left)))
            twins.pack(stopped)
    finally:
        twins.forget_loaders()
    return Staged(pairs=twins.pairs, left=left)


def check_stageable(model: torch.nn.Module) -> None:
    """Raises NotStageableError if the effect of loading is unknown for one of the model's modules."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise NotStageableError("the model is not in this machine's memory")
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if has_experts(layer):
            continue
        if is_deferred_attention_layer(layer):
            known = isinstance(layer, Attention) and not dict(layer.named_parameters())
        else:
            known = not isinstance(method, QuantizeMethodBase) or type(method) in _PLAIN_METHODS
        if not known:
            raise NotStageableError(f"{name} ({type(layer).__name__}) is not a layer type that can be staged")


def check_memory(num_bytes: int) -> None:
    """Raises NotStageableError if less than `_SPARE` times this much memory is free."""
    available = min(_memory_left())
    if available < _SPARE * num_bytes:
        raise NotStageableError(
            f"{_SPARE * num_bytes / 1e9:.1f} GB of memory are needed, {available / 1e9:.1f} are free"
        )


class _ShadowModel:
    """Twins of the served modules with new parameters; shared modules and parameters stay shared."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self._modules: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def of(self, layer: Any) -> Any:
        """Returns the twin of a module and its children."""
        if id(layer) in self._modules:
            return self._modules[id(layer)]
        twin = layer.__class__.__new__(layer.__class__)
        self._modules[id(layer)] = twin
        twin.__dict__.update(vars(layer))
        twin.__dict__["_modules"] = {
            name: child if child is None else self.of(child) for name, child in layer._modules.items()
        }
        transient = layer._non_persistent_buffers_set  # not in a checkpoint, so never loaded
        twin.__dict__["_buffers"] = {
            name: b if b is None or name in transient else b.clone() for name, b in layer._buffers.items()
        }
        plain = get_layerwise_info(layer).restore_metadata[0]  # parameters as they are before vLLM packs them
        if has_experts(layer):
            twin.__dict__["_parameters"] = dict(plain)  # on the meta device
            return twin
        twin.__dict__["_parameters"] = {
            name: self._parameter(name, layer._parameters.get(name), plain.get(name), twin)
            for name in {**plain, **layer._parameters}
        }
        self.pairs.append((layer, twin))
        return twin

    def _parameter(self, name: str, served: Any, plain: Any, shadow: Any) -> Any:
        """Returns a new parameter in the form that vLLM loads; layers that share a parameter share the new one."""
        raw = served if plain is None else plain
        if raw is None:
            return None
        if id(served) in self._tensors:
            return self._tensors[id(served)]
        new: Any = restore_layer_refs(materialize_meta_tensor(raw), shadow)
        if hasattr(new, "weight_loader"):
            # A reload leaves its wrapper here, which loads nothing after that reload.
            new.weight_loader = _get_original_loader(new)
        if served is not None:
            self._tensors[id(served)] = new
            is_matrix = name == "weight" and type(vars(shadow).get("quant_method")) in _PLAIN_METHODS
            if not is_matrix and served.shape == new.shape:
                new.data.copy_(served.data)  # keeps its value if the snapshot has none
        return new

    def forget_loaders(self) -> None:
        """Clears the new parameters' loaders: each makes a cycle, which would leak the embedding and packed head."""
        for _, twin in self.pairs:
            for new in twin._parameters.values():
                if new is not None:
                    vars(new).clear()

    def pack(self, stopped: threading.Event) -> None:
        """Packs the loaded matrices as vLLM does after loading a layer.

        Raises NotStageableError if packing changed more of a layer than its kernel and parameters, and
        StagingStoppedError if `stopped` was set.
        """
        self._tensors.clear()  # frees each matrix once it is packed
        kernels: dict[int, Any] = {}
        for layer, twin in self.pairs:
            method = vars(twin).get("quant_method")
            if type(method) not in _PLAIN_METHODS:
                continue
            if stopped.is_set():
                raise StagingStoppedError
            before = vars(twin) | twin._buffers
            weight = id(twin.weight) if type(method) is UnquantizedEmbeddingMethod else None
            if weight in kernels:  # a tied head shares one packed matrix
                setattr(twin, _KERNEL, kernels[weight])
                continue
            method.process_weights_after_loading(twin)
            after = vars(twin) | twin._buffers
            changed = {name for name in before.keys() | after.keys() if after.get(name) is not before.get(name)}
            if changed - {_KERNEL}:
                raise NotStageableError(f"packing a {type(layer).__name__} changes its {sorted(changed)}")
            if weight is not None:
                kernels[weight] = getattr(twin, _KERNEL)
        for layer, twin in self.pairs:
            _check_alike(layer, twin)


def _check_alike(layer: Any, shadow: Any) -> None:
    """Raises NotStageableError unless shapes and dtypes match, so that values can be copied."""
    for served, new in _distinct([(layer, shadow)]):
        if served.shape != new.shape or served.dtype != new.dtype:
            raise NotStageableError(f"a {type(layer).__name__} serves other parameters than it loads")


def _distinct(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each served parameter or buffer once with its new one, except empty ones."""
    seen: set[int] = set()
    for layer, twin in pairs:
        transient = layer._non_persistent_buffers_set
        for kind in ("_parameters", "_buffers"):
            served, new = getattr(layer, kind), getattr(twin, kind)
            for name, tensor in served.items():
                if tensor is None or name in transient or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if tensor.numel() or new[name].numel():
                    yield tensor, new[name]


def _until(stopped: threading.Event, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in tensors:
        if stopped.is_set():
            raise StagingStoppedError
        yield item


def _memory_left() -> list[int]:
    """Returns the free memory of the machine, and of this process's cgroup if it has a limit, in bytes."""
    fields = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    left = [1024 * int(fields["MemAvailable"].split()[0])]
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        left.append(int(limit) - int(used) + int(cached))
    except (OSError, ValueError, KeyError):  # another cgroup version, or "max": no limit
        pass
    return left
