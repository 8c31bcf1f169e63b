"""In-flight weight updates inside vLLM (PipelineRL, section 4): a verified local snapshot, mapped, loaded and proved.

vLLM imports this module in each of its processes, by the entry point `vllm.general_plugins` or, where
the project is not installed, because `WorkerPlugin` is named as its worker extension.

An update is two calls of `update_weights`: `check` maps the snapshot and compares it with the model
while generation goes on and changes nothing; `load` runs in the pause. So a snapshot that does not fit
never touches the weights being served, and whatever fails in `load` must end the engine.
"""

import ctypes
import dataclasses
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from bridge import codec
from bridge.published import WeightManifest
from bridge.snapshots.layout import check_table
from bridge.snapshots.writer import map_tensors

BACKEND = "sluice"
ENGINE_VARIABLE = "SLUICE_ENGINE"
"""Set in the processes of an engine that an actor started."""
CHECK, LOAD = "check", "load"
_PROBED_COLUMNS = 4
_PLAIN_EXPERTS = ("CPU", "TRITON", "BATCHED_TRITON")
"""vLLM's backends that hold experts as they are loaded (a CPU packs them only after that)."""
_PROBED_ROWS = 64
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(f"vllm.{__name__}")


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """What every snapshot must hold: tensor name -> (dtype, shape)."""

    expected: dict


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One call of an update."""

    action: str
    """`CHECK`, then `LOAD`."""
    path: str
    """The actor's verified local copy."""
    manifest: bytes
    """Its `WeightManifest`, encoded by `bridge.codec`."""


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads snapshots in Hugging Face names and layout."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _expected: dict[str, tuple[str, tuple[int, ...]]] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes the table of tensors that the model's own checkpoint has."""
        self._expected = {name: (dtype, tuple(shape)) for name, (dtype, shape) in init_info.expected.items()}

    def start_weight_update(self) -> None:
        """Nothing: what vLLM does here can't be undone, so it waits until the snapshot was checked."""

    def finish_weight_update(self) -> None:
        """Nothing: `LOAD` has done it."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Checks or loads a snapshot.

        Raises:
          SnapshotError: it is not at `path`, or does not fit the model; nothing was changed.
          RuntimeError: after `LOAD` the engine does not serve the snapshot; it must not go on.
        """
        manifest = codec.decode(WeightManifest, update_info.manifest)
        if self._expected is None:
            raise RuntimeError("init_weight_transfer_engine was not called")
        check_table(manifest, self._expected)
        arrays = map_tensors(update_info.path, manifest)
        if update_info.action == LOAD:
            self._load({name: _as_torch(array) for name, array in arrays.items()}, manifest)

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> None:
        initialize_layerwise_reload(self.model)
        model: Any = self.model  # its class is chosen at run time
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        is_tied = "lm_head.weight" not in tensors
        head = getattr(model, "lm_head", None)
        if is_tied and isinstance(head, ParallelLMHead):
            # The reload takes a tied head for one without weights, and on a CPU its kernel keeps a
            # repacked copy: the old one. vLLM reports success and serves a wrong model.
            head.quant_method.process_weights_after_loading(head)
        if self.parallel_config.tensor_parallel_size == 1:
            prove_served(self.model, tensors, seed=manifest.version.step)
        else:
            logger.warning("with tensor parallelism the loaded weights are proved by the learner's probe only")
        for module in self.model.modules():
            if _has_experts(module):
                _pack_experts(module)


def prove_served(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, seed: int) -> None:
    """Compares what the model computes with the snapshot, exactly, for about the price of one token.

    A matrix is asked through the very kernel that serves it (on a CPU the parameter itself is gone,
    repacked): its product with unit vectors must be the snapshot's columns, bit for bit, since all that
    is added to them is zero. Embeddings, norms and biases are compared directly. The columns and rows
    differ from update to update; the first and the last are always among them.

    Raises:
      RuntimeError: a tensor is not served as it is in the snapshot, or is served by no layer.
    """
    proved: set[str] = set()
    fused = getattr(model, "packed_modules_mapping", {})

    def parts(module_name: str, kind: str) -> list[torch.Tensor]:
        prefix, _, leaf = module_name.rpartition(".")
        prefix = prefix and prefix + "."
        names = [f"{prefix}{part}.{kind}" for part in fused.get(leaf, [leaf])]
        if names == ["lm_head.weight"] and names[0] not in tensors:
            names = ["model.embed_tokens.weight"]
        proved.update(names)
        return [tensors[name] for name in names]

    def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        want = want.to(device=got.device, dtype=got.dtype)
        if got.shape != want.shape or not torch.equal(got, want):
            raise RuntimeError(f"{name} is not served as it is in the snapshot (shape {tuple(got.shape)})")

    for name, module in model.named_modules():
        layer: Any = module  # what a layer has depends on its class
        if isinstance(module, LinearBase | ParallelLMHead):
            weights = parts(name, "weight")
            num_inputs = weights[0].shape[1]
            columns = _spread(num_inputs, _PROBED_COLUMNS, seed)
            device = next(model.parameters()).device
            units = torch.zeros(len(columns), num_inputs, dtype=weights[0].dtype, device=device)
            units[torch.arange(len(columns)), columns] = 1
            want = torch.cat([w[:, columns] for w in weights]).T
            got = layer.quant_method.apply(module, units, None)
            compare(name, got[:, : want.shape[1]], want)  # a head is padded
            if getattr(module, "bias", None) is not None and isinstance(module, LinearBase):
                compare(f"{name}.bias", layer.bias, torch.cat(parts(name, "bias")))
        elif isinstance(module, VocabParallelEmbedding):
            (weight,) = parts(name, "weight")
            rows = _spread(weight.shape[0], _PROBED_ROWS, seed)
            compare(name, layer.weight[rows], weight[rows])
        elif _has_experts(module):
            _compare_experts(name, module, tensors, proved, compare, seed)
        elif not any(module.children()) and f"{name}.weight" in tensors:
            (weight,) = parts(name, "weight")
            compare(name, layer.weight, weight)
    if unproved := sorted(tensors.keys() - proved):
        raise RuntimeError(f"{len(unproved)} tensors are served by no layer we know, first {unproved[0]}")


def _has_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "w13_weight") and hasattr(module, "w2_weight")


def _pack_experts(layer: Any) -> None:
    """Repacks a layer's experts for the CPU's kernel, which vLLM does at the first load and leaves out at a reload.

    (vLLM 0.32: `UnquantizedFusedMoEMethod._setup_kernel` skips it once a kernel is there. The kernel then takes the
    plain weights for packed ones: no error, and logprobs off by nats.)
    """
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if kernel is not None and layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)


def _compare_experts(
    name: str,
    module: Any,
    tensors: Mapping[str, torch.Tensor],
    proved: set[str],
    compare: Callable[[str, torch.Tensor, torch.Tensor], None],
    seed: int,
) -> None:
    """Compares rows of a layer's experts; vLLM holds gate and up as one [experts, 2 F, D], down as [experts, D, F].

    Some GPU kernels shuffle them. Then they are proved by the learner's probe only.
    """
    prefix = name.removesuffix(".routed_experts")
    gate_up, down = module.w13_weight, module.w2_weight
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if getattr(backend, "name", "") not in _PLAIN_EXPERTS:
        logger.warning("experts served by %s are proved by the learner's probe only", backend)
        proved.update(key for key in tensors if key.startswith(f"{prefix}."))
        return
    for i in range(gate_up.shape[0]):
        gate, up, out = (f"{prefix}.{i}.{part}_proj.weight" for part in ("gate", "up", "down"))
        rows = _spread(tensors[gate].shape[0], _PROBED_ROWS, seed)
        compare(gate, gate_up[i, rows, : tensors[gate].shape[1]], tensors[gate][rows])
        compare(up, gate_up[i, [tensors[gate].shape[0] + r for r in rows], : tensors[up].shape[1]], tensors[up][rows])
        rows = _spread(tensors[out].shape[0], _PROBED_ROWS, seed)
        compare(out, down[i, rows, : tensors[out].shape[1]], tensors[out][rows])
        proved.update((gate, up, out))


class WorkerPlugin:
    """Named as vLLM's worker extension so that each worker process imports this module."""


def register() -> None:
    """Makes the backend known to vLLM in this process; may be called again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)
    # It warns at every update of a tied head (see `_load`); a layer that really got nothing fails the proof.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    if os.environ.get(ENGINE_VARIABLE) and parent is not None:
        # An engine must not outlive a killed actor: it holds the cores, the memory and the port.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it died while this process was being imported
            os.kill(os.getpid(), signal.SIGKILL)


def _as_torch(array: np.ndarray) -> torch.Tensor:
    """A view; it is never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not take
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def _spread(size: int, number: int, seed: int) -> torch.Tensor:
    """Some distinct indices below `size`, the first and the last among them."""
    some = np.random.default_rng(seed).integers(0, size, number)
    return torch.from_numpy(np.unique(np.concatenate([[0, size - 1], some])))


register()
