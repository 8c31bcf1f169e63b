"""In-flight weight updates inside vLLM (PipelineRL, section 4): a verified local snapshot, mapped, loaded and proved.

vLLM imports this module in each of its processes, by the entry point `vllm.general_plugins` or, where
the project is not installed, because `WorkerPlugin` is named as its worker extension.

While generation goes on a thread of the worker (`actor.vllm.worker_channel`) maps the snapshot, compares it with the
model and stages it (`actor.vllm.staging`), and changes nothing; `update_weights` loads and proves it in the pause. So a
snapshot that does not fit never touches the weights being served, and whatever fails in `update_weights` must end the
engine.
"""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from actor.vllm.engine_setup import say_phases, skip_exit_gc
from actor.vllm.prefetch import PreparedSnapshot, SnapshotPrefetcher, mapped
from actor.vllm.verify_weights import has_experts, verify_served
from actor.vllm.worker_channel import listen
from bridge import codec
from bridge.processes import die_with_parent
from bridge.snapshots.snapshot_format import TensorTable, check_table
from bridge.weight_types import WeightManifest

BACKEND = "sluice"
ENGINE_VARIABLE = "SLUICE_ENGINE"
"""Set in the processes of an engine that an actor started."""
CPU_ADAPTERS = "actor.vllm.lora_cpu.GroupedCpuLora"
"""What multiplies by adapters on a CPU."""

logger = logging.getLogger(f"vllm.{__name__}")


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """What every snapshot must hold: tensor name -> (dtype, shape)."""

    expected: dict
    control: str
    """The path of the socket on which the front end's `WorkerChannel` listens."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update."""

    path: str
    """The actor's verified local copy."""
    manifest: bytes
    """Its `WeightManifest`, encoded by `bridge.codec`."""
    last_request: int
    """To prepare a snapshot, of those made before this update (`WorkerChannel.last_request`)."""


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads snapshots in Hugging Face names and layout."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _expected: TensorTable | None = None
    _control: socket.socket | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM makes it."""
        super().__init__(*args, **kwargs)
        self._next = SnapshotPrefetcher()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes the table of tensors that the model's own checkpoint has, and the front end's requests."""
        self.shutdown()  # the engine may have served another run
        self._next = next_ = SnapshotPrefetcher()
        self._expected = {name: (dtype, tuple(shape)) for name, (dtype, shape) in init_info.expected.items()}
        self._control = listen(init_info.control, lambda *request: self._prepare(next_, *request))

    def start_weight_update(self) -> None:
        """Nothing: `prepare` was there before."""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has done it."""

    def shutdown(self) -> None:
        """Takes no more requests, and lets go of what was prepared."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # the front end was first
                self._control.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._control = None
        self._next.close()

    def _prepare(self, next_: SnapshotPrefetcher, request: int, path: str, encoded: bytes) -> None:
        """Checks a snapshot and stages it, in a thread of its own; nothing if the request comes too late.

        Raises:
          SnapshotError: it is not at `path`, or does not fit the model; nothing was changed.
        """
        manifest = codec.decode(WeightManifest, encoded)
        self._check(manifest)
        if prepared := next_.prepare(request, path, manifest):
            prepared.stage(self.model)

    def _check(self, manifest: WeightManifest) -> None:
        if self._expected is None:
            raise RuntimeError("init_weight_transfer_engine was not called")
        check_table(manifest, self._expected)

    def drop(self) -> None:
        """Lets go of what was prepared, and of its file."""
        self._next.drop()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads a snapshot, prepared or not, and proves it.

        Raises:
          RuntimeError: the engine does not serve the snapshot; it must not go on.
        """
        manifest = codec.decode(WeightManifest, update_info.manifest)
        snapshot = self._next.take(update_info.last_request, manifest)
        if snapshot is None:
            self._check(manifest)
            snapshot = PreparedSnapshot(update_info.path, manifest)
        self._load(snapshot)
        snapshot.drop()

    @torch.no_grad()
    def _load(self, snapshot: PreparedSnapshot) -> None:
        if left := snapshot.serve():
            self._reload({name: tensor for name, tensor in snapshot.tensors.items() if name in left})
        verify_served(self.model, snapshot.tensors, seed=snapshot.manifest.version.step)
        for module in self.model.modules():
            if has_experts(module):
                _pack_experts(module)

    def _reload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads tensors by vLLM's own reload, layer by layer; layers of which none is there stay as they are."""
        initialize_layerwise_reload(self.model)
        model: Any = self.model  # its class is chosen at run time
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(model, "lm_head", None)
        is_tied = "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
        if is_tied and isinstance(head, ParallelLMHead):
            # The reload takes a tied head for one without weights, and on a CPU its kernel keeps a
            # repacked copy: the old one. vLLM reports success and serves a wrong model.
            head.quant_method.process_weights_after_loading(head)


def _pack_experts(layer: Any) -> None:
    """Repacks a layer's experts for the CPU's kernel, which vLLM does at the first load and leaves out at a reload.

    (vLLM 0.32: `UnquantizedFusedMoEMethod._setup_kernel` skips it once a kernel is there. The kernel then takes the
    plain weights for packed ones: no error, and logprobs off by nats.)
    """
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if kernel is not None and layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)


class WorkerPlugin:
    """vLLM's worker extension: each worker process imports this module, and has this for the front end to call."""

    weight_transfer_engine: Any
    model_runner: Any

    def drop_snapshot(self) -> None:
        """See `SnapshotTransfer.drop`."""
        self.weight_transfer_engine.drop()

    def load_adapter(self, number: int, path: str, manifest: bytes, settings: dict[str, Any]) -> None:
        """Takes an adapter from a verified snapshot; see `adapter_worker.load_adapter`, whose errors it raises."""
        from actor.vllm import lora_worker

        tensors = mapped(path, codec.decode(WeightManifest, manifest))
        lora_worker.load_adapter(self.model_runner, number, tensors, settings)

    def prove_base(self, folder: str, table: dict[str, Any]) -> None:
        """Compares the base with its folder; see `adapter_worker.prove_base`, whose errors it raises."""
        from actor.vllm import lora_worker

        lora_worker.verify_base(self.model_runner.get_model(), pathlib.Path(folder), table)


def register() -> None:
    """Makes the backend known to vLLM in this process; may be called again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)
        skip_exit_gc()
    if current_platform.is_cpu():  # named, not imported: few engines have adapters
        current_platform.get_punica_wrapper = lambda: CPU_ADAPTERS
    # It warns at every update of a tied head (see `_load`); a layer that really got nothing fails the proof.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    if os.environ.get(ENGINE_VARIABLE) and parent is not None:
        say_phases()
        # An engine must not outlive a killed actor: it holds the cores, the memory and the port.
        die_with_parent(parent.pid)


register()
