"""Staging on vLLM's own models, in this process; what vLLM's reload makes of the same snapshot is the oracle."""

import dataclasses
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support import models

pytestmark = pytest.mark.heavy  # vLLM's import
OLD, NEW = 1, 2
"""Seeds of two snapshots."""


@pytest.fixture(scope="module")
def parallel():
    """A tensor-parallel group of this process alone."""
    from actor.vllm.engine_setup import set_environment
    from configs.schema import Config

    set_environment(Config(preset="test"))
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.accelerator.empty_cache", lambda: None)  # as in vLLM's worker on a CPU
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                world_size=1, rank=0, local_rank=0, distributed_init_method="tcp://127.0.0.1:0", backend="gloo"
            )
            parallel_state.initialize_model_parallel()
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Served:
    """A model as an engine's worker has it."""

    def __init__(self, folder: Path, family: models.Family, tied: bool) -> None:
        import torch
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig, set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        from actor.vllm.worker import BACKEND, SnapshotTransfer

        models.make_folder(folder, family=family, tied=tied)
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            self.model: Any = get_model(vllm_config=config)
        device: Any = torch.device("cpu")
        self.transfer: Any = SnapshotTransfer(WeightTransferConfig(backend=BACKEND), config, device, self.model)
        self._weights = models.read_weights(folder)

    def tensors(self, seed: int) -> dict[str, Any]:
        """A snapshot, of which every tensor is another one's."""
        import torch

        return {name: torch.from_numpy(w) for name, w in models.perturbed(self._weights, seed=seed).items()}

    def reload(self, tensors: dict[str, Any]) -> None:
        """As vLLM does it."""
        import torch

        with torch.no_grad():
            self.transfer._reload(tensors)

    def stage(self, tensors: dict[str, Any]) -> Any:
        from actor.vllm.staging import stage

        return stage(self.model, tensors, threading.Event())

    def computes(self) -> dict[str, Any]:
        """What each layer makes of random inputs, and all parameters."""
        import torch
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        found: dict[str, Any] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            if isinstance(layer, LinearBase | ParallelLMHead):
                num_inputs = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
                x = torch.randn(5, num_inputs, generator=torch.Generator().manual_seed(0))
                found[f"{name}()"] = layer.quant_method.apply(layer, x, None)
        return found


@pytest.fixture(
    scope="module",
    params=[("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3_moe", False)],
    ids=["biases-tied", "biases-untied", "norms-tied", "experts"],
)
def served(parallel, request, tmp_path_factory):
    return Served(tmp_path_factory.mktemp("model"), *request.param)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    import torch

    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_staged_snapshot_serves_as_a_reloaded_one_and_nothing_changes_before(served):
    old, new = served.tensors(OLD), served.tensors(NEW)
    served.reload(new)
    want = served.computes()
    served.reload(old)
    before = served.computes()
    addresses = {name: p.data_ptr() for name, p in served.model.named_parameters() if p.numel()}
    staged = served.stage(new)
    assert_same(served.computes(), before)
    assert all(".experts." in name for name in staged.left)
    if staged.left:
        served.reload({name: new[name] for name in staged.left})
    staged.serve()
    assert_same(served.computes(), want)
    assert {name: p.data_ptr() for name, p in served.model.named_parameters() if p.numel()} == addresses
    served.stage(old).serve()  # and so again
    served.reload({name: old[name] for name in staged.left}) if staged.left else None
    assert_same(served.computes(), before)


def test_any_layer_that_is_left_out_fails_the_proof(served):
    import torch

    from actor.vllm.verify_weights import verify_served

    old, new = served.tensors(OLD), served.tensors(NEW)
    served.reload(old)
    staged, back = served.stage(new), served.stage(old)
    served.reload({name: new[name] for name in staged.left}) if staged.left else None
    tried = 0
    with torch.no_grad():
        for i, (layer, twin) in enumerate(staged.pairs):
            others = [p for j, (_, t) in enumerate(staged.pairs) if j != i for p in t._parameters.values()]
            own = [p for p in twin._parameters.values() if p is not None and p.numel() and not _is_in(p, others)]
            if not own and ("cpu_linear" not in vars(twin) or type(layer).__name__ == "VocabParallelEmbedding"):
                continue
            tried += 1
            back.serve()
            dataclasses.replace(staged, pairs=staged.pairs[:i] + staged.pairs[i + 1 :]).serve()
            with pytest.raises(RuntimeError, match="not served as it is in the snapshot"):
                verify_served(served.model, new, seed=i)
        staged.serve()
        verify_served(served.model, new, seed=0)
    assert tried >= 2 * 6  # of each layer four matrices, or two beside experts, and two norms at least


def _is_in(tensor: Any, others: list[Any]) -> bool:
    return any(tensor is other for other in others)


def test_staging_that_is_stopped_changes_nothing(served):
    from actor.vllm.staging import StagingStoppedError, stage

    served.reload(served.tensors(OLD))
    before = served.computes()
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StagingStoppedError):
        stage(served.model, served.tensors(NEW), stopped)
    assert_same(served.computes(), before)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_of_a_snapshot_is_left_once_it_is_let_go_without_the_garbage_collector(
    parallel, is_stopped, tmp_path, monkeypatch
):
    from actor.vllm import staging

    served = Served(tmp_path / "model", "qwen2", tied=True)  # after a reload vLLM's loaders are others

    made: list[Any] = []
    make = staging._ShadowModel._parameter

    def watched(*arguments: Any) -> Any:
        new = make(*arguments)
        if new is not None:
            made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(staging._ShadowModel, "_parameter", watched)
    if is_stopped:
        monkeypatch.setattr(staging._ShadowModel, "pack", stop)
    gc.collect()
    gc.disable()  # an engine's runs hardly ever
    try:
        if is_stopped:
            with pytest.raises(staging.StagingStoppedError):
                served.stage(served.tensors(NEW))
        else:
            first = served.stage(served.tensors(NEW))
            kernels = [weakref.ref(twin.cpu_linear) for _, twin in first.pairs if "cpu_linear" in vars(twin)]
            first.serve()
            del first
            served.stage(served.tensors(OLD)).serve()
            assert len(kernels) > 6 and not any(kernel() for kernel in kernels)
        assert len(made) > 10 and not any(new() is not None for new in made)
    finally:
        gc.enable()


def stop(*_: Any) -> None:
    from actor.vllm.staging import StagingStoppedError

    raise StagingStoppedError


def test_model_with_a_layer_that_is_loaded_in_its_own_way_is_not_staged(served, monkeypatch):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from actor.vllm.staging import NotStageableError

    class OtherMethod(UnquantizedLinearMethod):
        pass

    layer = served.model.model.layers[1].self_attn.o_proj
    monkeypatch.setattr(layer, "quant_method", OtherMethod())
    with pytest.raises(NotStageableError, match="layers.1.self_attn.o_proj .* not a layer type that can be staged"):
        served.stage(served.tensors(NEW))


def test_layer_whose_packing_changes_more_than_its_kernel_is_not_staged(served, monkeypatch):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from actor.vllm.staging import NotStageableError

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def other(self, layer):
        pack(self, layer)
        layer.scales = "new"

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", other)
    with pytest.raises(NotStageableError, match="changes its .*scales"):
        served.stage(served.tensors(NEW))


def test_without_the_memory_for_it_nothing_is_staged(served, monkeypatch):
    from actor.vllm import staging

    tensors = served.tensors(NEW)
    monkeypatch.setattr(staging, "_memory_left", lambda: [10**12, sum(t.nbytes for t in tensors.values()) // 2])
    with pytest.raises(staging.NotStageableError, match="GB of memory are needed"):
        served.stage(tensors)


@pytest.fixture
def snapshot(served, tmp_path):
    """A written and mirrored version: its manifest, its file, and the next version's mirror."""
    writer = SnapshotWriter(tmp_path / "weights", run="r", tokenizer_hash="t")
    mirror = VerifiedCopy(tmp_path / "weights", tmp_path / "copy", run="r", tokenizer_hash="t", lock_timeout_s=10)
    arrays = {name: t.numpy() for name, t in served.tensors(NEW).items()}

    def write(step: int):
        manifest = write_whole(writer, Version(incarnation=0, step=step), arrays, dtype="float32")
        mirror.fetch(manifest)
        return manifest

    return tmp_path / "copy", write


def in_a_thread(work: Any, *arguments: Any) -> None:
    """It changes which cores its thread may use."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


@pytest.mark.parametrize("stages", [True, False])
def test_prepared_snapshot_gives_what_it_staged_and_lets_its_file_go(served, snapshot, stages):
    from actor.vllm.snapshot_prefetch import PreparedSnapshot

    path, write = snapshot
    served.reload(served.tensors(OLD))
    before = served.computes()
    prepared = PreparedSnapshot(str(path), write(0))
    if stages:
        in_a_thread(prepared.stage, served.model)
    assert_same(served.computes(), before)
    left = prepared.serve()
    assert left == {name for name in prepared.tensors if ".experts." in name or not stages}
    prepared.drop()
    join("drop")
    write(1)  # the file is not locked any more


def test_snapshot_that_can_not_be_staged_is_left_for_the_pause(served, snapshot, monkeypatch):
    from actor.vllm import snapshot_prefetch

    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(snapshot_prefetch, "stage", fails)
    path, write = snapshot
    prepared = snapshot_prefetch.PreparedSnapshot(str(path), write(0))
    in_a_thread(prepared.stage, served.model)
    assert prepared.serve() == prepared.tensors.keys()
    prepared.drop()
    join("drop")


def test_snapshot_that_is_served_already_is_not_staged_any_more(served, snapshot, monkeypatch):
    from actor.vllm import snapshot_prefetch

    staged: list[Any] = []
    monkeypatch.setattr(snapshot_prefetch, "stage", lambda *arguments: staged.append(arguments))
    path, write = snapshot
    prepared = snapshot_prefetch.PreparedSnapshot(str(path), write(0))
    prepared.serve()
    in_a_thread(prepared.stage, served.model)
    assert not staged
    prepared.drop()
    join("drop")


@pytest.fixture
def asked(served, snapshot, monkeypatch):
    """The worker's side of an engine: what is asked of it in its own thread, and what vLLM calls."""
    from actor.vllm import worker
    from bridge import codec

    path, write = snapshot
    transfer, handlers = served.transfer, []
    monkeypatch.setattr(worker, "listen", lambda address, handle: handlers.append(handle))
    expected = {name: ["float32", list(t.shape)] for name, t in served.tensors(NEW).items()}
    transfer.init_transfer_engine(worker.InitInfo(expected=expected, control="nowhere"))

    class Asked:
        def writes(self, step: int) -> Any:
            return write(step)

        def prepare(self, request: int, manifest: Any) -> None:
            in_a_thread(handlers[-1], request, str(path), codec.encode(manifest))

        def load(self, manifest: Any, *, last_request: int) -> None:
            encoded = codec.encode(manifest)
            info = worker.UpdateInfo(path=str(path), manifest=encoded, last_request=last_request)
            transfer.receive_weights(info)
            join("drop")

    yield Asked()
    transfer.shutdown()
    join("drop")


def test_late_request_neither_drops_the_snapshot_that_is_loaded_nor_keeps_its_file(served, asked, monkeypatch):
    load, found = served.transfer._load, []

    def meanwhile(snapshot: Any) -> None:
        asked.prepare(1, manifest)
        join("drop")
        found.append(len(snapshot.tensors))
        load(snapshot)

    served.reload(served.tensors(OLD))
    monkeypatch.setattr(served.transfer, "_load", meanwhile)
    manifest = asked.writes(0)
    asked.load(manifest, last_request=1)
    assert found == [len(manifest.tensors)]
    asked.prepare(1, manifest)
    asked.writes(1)  # the file is not locked


def test_next_request_after_a_late_one_is_staged(served, asked, monkeypatch):
    from actor.vllm.snapshot_prefetch import PreparedSnapshot

    serve, left = PreparedSnapshot.serve, []
    monkeypatch.setattr(PreparedSnapshot, "serve", lambda self: left.append(serve(self)) or left[-1])
    asked.load(asked.writes(0), last_request=1)
    manifest = asked.writes(1)
    asked.prepare(1, manifest)
    asked.prepare(2, manifest)
    asked.load(manifest, last_request=2)
    unstaged, staged = left
    assert len(unstaged) == len(manifest.tensors) and staged == {name for name in unstaged if ".experts." in name}


def test_snapshot_that_is_prepared_and_not_loaded_makes_room_for_the_next(served, asked):
    from actor.vllm.worker import WorkerPlugin

    asked.prepare(1, asked.writes(0))
    worker: Any = WorkerPlugin()
    worker.weight_transfer_engine = served.transfer
    worker.drop_snapshot()
    join("drop")
    asked.load(asked.writes(1), last_request=1)
    asked.writes(2)


def test_request_after_the_engines_end_keeps_no_file(served, asked):
    manifest = asked.writes(0)
    served.transfer.shutdown()
    asked.prepare(7, manifest)
    asked.writes(1)


MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 fe:00 123                        /srv/a clone/torch/lib/libgomp.so.1
7f0000002000-7f0000003000 r--p 00000000 fe:00 124                        /srv/x.libs/libgomp-6a29c32d.so.1.0.0
7f0000004000-7f0000005000 r--p 00000000 fe:00 125                        /srv/libgomp.so.1/other.so
7f0000006000-7f0000007000 rw-p 00000000 00:00 0                          [heap]
"""


def test_openmp_is_found_below_any_path():
    from actor.vllm.snapshot_prefetch import _OPENMP

    assert _OPENMP.findall(MAPS) == ["/srv/a clone/torch/lib/libgomp.so.1", "/srv/x.libs/libgomp-6a29c32d.so.1.0.0"]
