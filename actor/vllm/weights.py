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
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actor.vllm.phases import say_phases
from actor.vllm.processes import end_quickly
from actor.vllm.proof import has_experts, prove_served
from bridge import codec
from bridge.published import WeightManifest
from bridge.snapshots.layout import check_table
from bridge.snapshots.writer import map_tensors

BACKEND = "sluice"
ENGINE_VARIABLE = "SLUICE_ENGINE"
"""Set in the processes of an engine that an actor started."""
CHECK, LOAD = "check", "load"
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
        prove_served(self.model, tensors, seed=manifest.version.step)
        for module in self.model.modules():
            if has_experts(module):
                _pack_experts(module)


def _pack_experts(layer: Any) -> None:
    """Repacks a layer's experts for the CPU's kernel, which vLLM does at the first load and leaves out at a reload.

    (vLLM 0.32: `UnquantizedFusedMoEMethod._setup_kernel` skips it once a kernel is there. The kernel then takes the
    plain weights for packed ones: no error, and logprobs off by nats.)
    """
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if kernel is not None and layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)


class WorkerPlugin:
    """Named as vLLM's worker extension so that each worker process imports this module."""


def register() -> None:
    """Makes the backend known to vLLM in this process; may be called again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)
        end_quickly()
    # It warns at every update of a tied head (see `_load`); a layer that really got nothing fails the proof.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    if os.environ.get(ENGINE_VARIABLE) and parent is not None:
        say_phases()
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


register()
