"""In-flight weight updates inside vLLM (PipelineRL, section 4): map, load and verify a verified local snapshot.

vLLM imports this module in each of its processes: by the entry point `vllm.general_plugins`, or, if the project is not
installed, because `WorkerPlugin` is its worker extension.

During generation a thread of the worker (`actor.vllm.worker_channel`) maps the snapshot, compares it with the model and
stages it (`actor.vllm.staging`) without side effects. `update_weights` loads and verifies it in the pause. So a
snapshot that does not fit never touches the served weights, and any failure in `update_weights` must stop the engine.
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
from actor.vllm.snapshot_prefetch import PreparedSnapshot, SnapshotPrefetcher, mapped
from actor.vllm.verify_weights import has_experts, verify_served
from actor.vllm.worker_channel import listen
from bridge import codec
from bridge.device_turns import EngineTurn
from bridge.processes import die_with_parent
from bridge.snapshots.snapshot_format import TensorTable, check_table
from bridge.weight_types import WeightManifest

BACKEND = "sluice"
ENGINE_VARIABLE = "SLUICE_ENGINE"
"""Environment variable set in the processes of an actor's engine."""
CPU_ADAPTERS = "actor.vllm.lora_cpu.GroupedCpuLora"

logger = logging.getLogger(f"vllm.{__name__}")


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """Expected tensors of every snapshot: tensor name -> (dtype, shape)."""

    expected: dict
    control: str
    """Path of the socket on which the front end's `WorkerChannel` listens."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of one update."""

    path: str
    manifest: bytes
    """`WeightManifest` of the snapshot, encoded by `bridge.codec`."""
    last_request: int
    """Number of the last prepare request before this update (`WorkerChannel.last_request`)."""


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Transfer engine for snapshots in Hugging Face names and layout."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _expected: TensorTable | None = None
    _control: socket.socket | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next = SnapshotPrefetcher()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Stores the expected tensors and starts to accept prepare requests."""
        self.shutdown()  # the engine may have served another run
        self._next = next_ = SnapshotPrefetcher()
        self._expected = {name: (dtype, tuple(shape)) for name, (dtype, shape) in init_info.expected.items()}
        self._control = listen(init_info.control, lambda *request: self._prepare(next_, *request))

    def start_weight_update(self) -> None:
        """Does nothing: `_prepare` has run before."""

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has finished the update."""

    def shutdown(self) -> None:
        """Stops accepting requests, and releases the prepared snapshot."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # the front end disconnected first
                self._control.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._control = None
        self._next.close()

    def _prepare(self, next_: SnapshotPrefetcher, request: int, path: str, encoded: bytes) -> None:
        """Checks and stages a snapshot in the channel's thread; raises SnapshotError if it does not fit the model."""
        manifest = codec.decode(WeightManifest, encoded)
        self._check(manifest)
        if prepared := next_.prepare(request, path, manifest):
            prepared.stage(self.model)

    def _check(self, manifest: WeightManifest) -> None:
        if self._expected is None:
            raise RuntimeError("init_weight_transfer_engine was not called")
        check_table(manifest, self._expected)

    def drop(self) -> None:
        """Releases the prepared snapshot and its file."""
        self._next.drop()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads a snapshot, prepared or not, and verifies it; after a RuntimeError the engine must stop."""
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
        """Loads tensors with vLLM's layerwise reload; layers without tensors stay unchanged."""
        initialize_layerwise_reload(self.model)
        model: Any = self.model  # its class is chosen at run time
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(model, "lm_head", None)
        is_tied = "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
        if is_tied and isinstance(head, ParallelLMHead):
            # The reload treats a tied head as having no weights, and on a CPU its kernel keeps the old repacked copy.
            # vLLM reports success and serves a wrong model.
            head.quant_method.process_weights_after_loading(head)


def _pack_experts(layer: Any) -> None:
    """Repacks a layer's experts for the CPU kernel, which vLLM does at the first load but not at a reload.

    In vLLM 0.32 `UnquantizedFusedMoEMethod._setup_kernel` skips it once a kernel exists. The kernel then reads unpacked
    weights as packed: no error, but logprobs differ by nats.
    """
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    if kernel is not None and layer.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(layer)


class WorkerPlugin:
    """Worker extension of vLLM; its methods are callable from the front end."""

    weight_transfer_engine: Any
    model_runner: Any
    turn: EngineTurn

    def hold_devices(self, folder: str, name: str) -> None:
        """Holds the devices that the engine shares with a trainer, until `release_devices`."""
        self.turn = EngineTurn(pathlib.Path(folder), name)
        self.turn.join()

    def release_devices(self) -> None:
        """Lets the trainer have the devices, whose memory is free."""
        self.turn.close()

    def drop_snapshot(self) -> None:
        """Releases the prepared snapshot; see `SnapshotTransfer.drop`."""
        self.weight_transfer_engine.drop()

    def load_adapter(self, number: int, path: str, manifest: bytes, settings: dict[str, Any]) -> None:
        """Loads an adapter from a verified snapshot; raises the errors of `lora_worker.load_adapter`."""
        from actor.vllm import lora_worker

        tensors = mapped(path, codec.decode(WeightManifest, manifest))
        lora_worker.load_adapter(self.model_runner, number, tensors, settings)

    def prove_base(self, folder: str, table: dict[str, Any]) -> None:
        """Compares the base with its folder; raises the errors of `lora_worker.verify_base`."""
        from actor.vllm import lora_worker

        lora_worker.verify_base(self.model_runner.get_model(), pathlib.Path(folder), table)


def register() -> None:
    """Registers the backend with vLLM in this process. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)
        skip_exit_gc()
    if current_platform.is_cpu():  # named, not imported: few engines have adapters
        current_platform.get_punica_wrapper = lambda: CPU_ADAPTERS
    # It warns at every update of a tied head (see `_reload`); verification catches a layer that really got no weights.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    if os.environ.get(ENGINE_VARIABLE) and parent is not None:
        say_phases()
        # Exit with a killed actor: the engine holds cores, memory and the port.
        die_with_parent(parent.pid)


register()
