"""An update as the front end makes it; the engine is a list of calls here, its worker a thread."""

import sys
import threading
import types
from typing import Any

import numpy as np
import pytest

from actor.engine_protocol import EngineDeadError, WeightLoadError
from actor.vllm import updates
from actor.vllm.convert import StatLogger
from actor.vllm.updates import WeightUpdates
from actor.vllm.worker_channel import WorkerChannel, listen
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import WeightManifest
from configs.schema import Config
from configs.sections import PublishConfig
from tests.bridge.snapshots.whole import write_whole

TABLE = {"a.weight": ("float32", (2, 4))}


class DeadError(Exception):
    pass


class Request:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """What is asked of vLLM itself, without loading it."""
    requests = {f"WeightTransfer{kind}Request": Request for kind in ("Init", "Update")}
    for name, content in (
        ("vllm", {}),
        ("vllm.v1", {}),
        ("vllm.v1.engine", {}),
        ("vllm.v1.engine.exceptions", {"EngineDeadError": DeadError}),
        ("vllm.distributed", {}),
        ("vllm.distributed.weight_transfer", {}),
        ("vllm.distributed.weight_transfer.base", requests),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


class FakeLlm:
    """Takes what it is told; its worker prepares what it is asked to once `may_prepare` is set."""

    def __init__(self) -> None:
        self.engine_core = self
        self.calls: list[str] = []
        self.prepared: list[int] = []
        """Numbers of the requests that the worker was done with, when it was."""
        self.staged: list[bool] = []
        """Of each load: whether the last request before it was done."""
        self.may_prepare = threading.Event()
        self.may_prepare.set()
        self.refusal: str | None = None
        self.failure: Exception | None = None
        self.worker: Any = None

    def prepare(self, number: int, path: str, manifest: bytes) -> None:
        self.may_prepare.wait()
        if self.refusal is not None:
            raise ValueError(self.refusal)
        self.prepared.append(number)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.worker = listen(request.init_info["control"], self.prepare)

    async def update_weights(self, request: Any) -> None:
        self.calls.append("load")
        self.staged.append(request.update_info["last_request"] in self.prepared)
        if self.failure is not None:
            raise self.failure

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any, **options: Any) -> None:
            self.calls.append(name)

        return called


class Rig:
    def __init__(self, folder: Any, **publish: Any) -> None:
        self.llm: Any = FakeLlm()
        self.counter = StatLogger()
        config = Config(preset="t", publish=PublishConfig(**publish))
        self.updates = WeightUpdates(self.llm, config, expected=TABLE, counter=self.counter)
        self._writer = SnapshotWriter(folder / "snapshots", run="r", tokenizer_hash="t")
        self._folder, self._step = folder, 0

    def written(self, shape: tuple[int, ...] = (2, 4)) -> WeightManifest:
        self._step += 1
        arrays = {name: np.zeros(shape, np.float32) for name in TABLE}
        return write_whole(self._writer, Version(incarnation=0, step=self._step), arrays, dtype="float32")

    async def swap(self, **options: Any) -> None:
        await self.updates.swap(self._folder, self.written(**options))


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.llm.may_prepare.set()
    rig.updates.close()


async def test_version_that_is_not_staged_in_time_is_loaded_and_the_next_is_staged_again(rig, monkeypatch):
    large = types.SimpleNamespace(encode=lambda manifest: bytes(2**24))  # more than a socket holds
    monkeypatch.setattr(updates, "codec", large)
    await rig.swap()
    rig.llm.may_prepare.clear()
    rig.updates._stage_s = 0
    for _ in range(2):  # the second finds the worker still at the first
        await rig.swap()
    rig.updates._stage_s = 60
    rig.llm.may_prepare.set()
    await rig.swap()
    assert rig.llm.staged == [True, False, False, True]
    assert rig.updates.failure is None and rig.updates.is_open.is_set()


async def test_staging_leaves_half_of_the_updates_timeout_to_the_load(rig, monkeypatch):
    timeouts = []
    monkeypatch.setattr(WorkerChannel, "ask", lambda self, *message, timeout_s: timeouts.append(timeout_s) or [])
    await rig.swap()
    assert timeouts == [Config(preset="t").supervision.engine_timeout_s / 2]


@pytest.mark.parametrize("at_publish", ["keep", "abort_and_resume", "drain"])
async def test_no_request_starts_while_weights_are_loaded(tmp_path, monkeypatch, at_publish):
    rig, seen = Rig(tmp_path, at_publish=at_publish), []
    load = rig.llm.update_weights

    async def look_and_load(request: Any) -> None:
        seen.append(rig.updates.is_open.is_set())
        await load(request)

    monkeypatch.setattr(rig.llm, "update_weights", look_and_load)
    await rig.swap()
    rig.updates.close()
    assert seen == [False] and rig.updates.is_open.is_set()


async def test_pause_is_excluded_from_the_decode_speeds_before_the_engine_resumes(rig, monkeypatch):
    monkeypatch.setattr(rig.counter, "skip_interval", lambda: rig.llm.calls.append("skip_interval"))
    await rig.swap()
    assert rig.llm.calls[-2:] == ["skip_interval", "resume_generation"]


async def test_refused_version_is_dropped_everywhere_and_nothing_is_loaded(rig):
    with pytest.raises(WeightLoadError, match=r"\[3, 4\]|\(3, 4\)"):
        await rig.swap(shape=(3, 4))
    rig.llm.refusal = "it is not there"
    with pytest.raises(WeightLoadError, match="version 0.2 was refused: it is not there"):
        await rig.swap()
    assert rig.llm.calls == ["collective_rpc"]
    rig.llm.refusal = None
    await rig.swap()
    assert rig.llm.staged == [True]


async def test_worker_that_has_ended_and_load_that_fails_are_the_engines_end(rig):
    rig.llm.failure = RuntimeError("out of memory")
    with pytest.raises(EngineDeadError, match="failed while loading: out of memory"):
        await rig.swap()
    assert isinstance(rig.updates.failure, EngineDeadError) and rig.updates.is_open.is_set()
    rig.llm.worker.shutdown(2)
    with pytest.raises(EngineDeadError, match="died before a weight update"):
        await rig.swap()
    assert rig.llm.calls.count("load") == 1
