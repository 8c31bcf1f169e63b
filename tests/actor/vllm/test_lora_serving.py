"""Which adapters an engine holds, and who uses them; the engine is a list of calls here."""

import asyncio
import sys
import types

import numpy as np
import pytest

from actor.engine_protocol import EngineDeadError, WeightLoadError
from actor.vllm import lora_serving
from actor.vllm.lora_serving import Adapters, engine_arguments
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from configs.schema import Config
from configs.sections import LoraConfig, PublishConfig
from tests.bridge.snapshots.whole import write_whole

TABLE = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("float32", (2, 4))}


class DeadError(Exception):
    pass


class FakeLlm:
    """Takes what it is told; a request that is aborted ends soon after, if it has come so far as to be known."""

    def __init__(self):
        self.held, self.calls, self.aborted, self.fails = set(), [], [], None
        self.known = set()
        self.ended = {}
        self.asked = asyncio.Queue()
        """Ids that were to be aborted, one call at a time."""

    async def collective_rpc(self, method, args):
        self.calls.append((method, args[0]))
        await asyncio.sleep(0)
        if self.fails is not None and method == "load_adapter":
            self.held.add(args[0])  # half of it may be there
            raise self.fails
        if method == "load_adapter":
            self.held.add(args[0])

    async def remove_lora(self, number):
        await asyncio.sleep(0)
        self.held.discard(number)
        return True

    async def abort(self, ids):
        self.aborted += ids
        self.asked.put_nowait(list(ids))
        for one in set(ids) & self.known:
            self.ended.setdefault(one, asyncio.Event()).set()


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """What is asked of vLLM itself, without loading it."""
    for name, content in (
        ("vllm", {}),
        ("vllm.v1", {}),
        ("vllm.v1.engine", {}),
        ("vllm.v1.engine.exceptions", {"EngineDeadError": DeadError}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def config(**publish):
    lora = LoraConfig(rank=9, targets="q,v")
    return Config(preset="t", lora=lora, publish=PublishConfig(lora="adapter", **publish))


class Rig:
    def __init__(self, tmp_path, *, max_adapters=lora_serving.MAX_ADAPTERS, **publish):
        self.llm = FakeLlm()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lora_serving, "MAX_ADAPTERS", max_adapters)
            self.adapters = Adapters(self.llm, config(**publish), expected=TABLE, base={}, folder=tmp_path)  # pyright: ignore[reportArgumentType]
        self.writer = SnapshotWriter(tmp_path / "snapshots", run="r", tokenizer_hash="t")
        self.path, self.ran = tmp_path, {}

    async def publish(self, step, shape=(2, 4)):
        arrays = {name: np.zeros(shape, np.float32) for name in TABLE}
        manifest = write_whole(self.writer, Version(incarnation=0, step=step), arrays, dtype="float32")
        return await self.adapters.swap(self.path, manifest)

    def request(self, name):
        """A response that goes on for as long as nobody ends it, as `VllmEngine.sample` makes it."""

        async def run():
            while True:
                with self.adapters.used_by(name) as adapter:
                    self.ran.setdefault(name, []).append(adapter.version.step)
                    self.llm.known.add(name)
                    ended = self.llm.ended.setdefault(name, asyncio.Event())
                    await ended.wait()
                    self.llm.known.discard(name)
                    ended.clear()
                if not self.adapters.moves(name):
                    return

        return asyncio.create_task(run())

    async def end(self, name, task):
        self.llm.ended[name].set()
        await task
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


async def test_requests_stay_with_their_adapter_which_goes_when_the_last_one_ends(tmp_path):
    rig = Rig(tmp_path, max_adapters=2)
    await rig.publish(0)
    first, second = rig.request("a"), rig.request("b")
    await rig.settle()
    await rig.publish(1)
    assert rig.llm.held == {1, 2} and len(rig.adapters._users) == 2
    third = rig.request("c")
    await rig.settle()
    await rig.end("a", first)
    assert rig.llm.held == {1, 2}
    await rig.end("b", second)
    assert rig.llm.held == {2} and not rig.llm.aborted
    await rig.end("c", third)
    assert rig.llm.held == {2}  # what begins next runs under it
    assert rig.ran == {"a": [0], "b": [0], "c": [1]}


async def test_of_more_than_may_stay_the_oldest_ones_requests_go_on_under_the_newest(tmp_path):
    rig = Rig(tmp_path, max_adapters=2)
    tasks = {}
    for step in range(4):
        await rig.publish(step)
        await rig.settle()
        assert len(rig.llm.held) <= 2
        tasks[f"r{step}"] = rig.request(f"r{step}")
        await rig.settle()
    assert rig.ran == {"r0": [0, 2], "r1": [1, 3], "r2": [2], "r3": [3]}
    for name, task in tasks.items():
        await rig.end(name, task)
    assert rig.llm.held == {4}


async def test_abort_and_resume_moves_all_requests(tmp_path):
    rig = Rig(tmp_path, at_publish="abort_and_resume")
    await rig.publish(0)
    task = rig.request("a")
    await rig.settle()
    for step in (1, 2):
        await rig.publish(step)
        await rig.settle()
        assert rig.llm.held == {step + 1}
    await rig.end("a", task)
    assert rig.ran == {"a": [0, 1, 2]}


async def test_a_request_on_its_way_to_the_engine_is_ended_as_soon_as_it_is_there(tmp_path):
    rig = Rig(tmp_path, max_adapters=1)
    await rig.publish(0)
    with rig.adapters.used_by("late") as adapter:
        assert adapter is not None
        swap = asyncio.create_task(rig.publish(1))
        for _ in range(3):  # again and again
            assert await rig.llm.asked.get() == ["late"]
        assert not swap.done()
    await swap
    assert rig.adapters.moves("late") and not rig.adapters.moves("late") and rig.llm.held == {2}


@pytest.mark.parametrize(("failure", "kind"), [(RuntimeError("x"), WeightLoadError), (DeadError(), EngineDeadError)])
async def test_a_version_that_is_not_taken_leaves_the_one_before(failure, kind, tmp_path):
    rig = Rig(tmp_path)
    with pytest.raises(WeightLoadError, match=r"\[3, 4\]|\(3, 4\)"):
        await rig.publish(0, shape=(3, 4))
    assert rig.adapters.version is None
    await rig.publish(1)
    rig.llm.fails = failure
    with pytest.raises(kind):
        await rig.publish(2)
    await rig.settle()
    assert rig.adapters.version == Version(incarnation=0, step=1)
    if kind is WeightLoadError:
        assert len(rig.llm.held) == 1
        rig.llm.fails = None
        await rig.publish(3)
        assert rig.adapters.version == Version(incarnation=0, step=3) and len(rig.llm.held) == 1
        assert sum(method == "prove_base" for method, _ in rig.llm.calls) == 1


def test_engine_arguments_have_room_for_the_next_and_a_rank_that_vllm_knows():
    told = engine_arguments(config())
    assert told["max_loras"] == told["max_cpu_loras"] == lora_serving.MAX_ADAPTERS + 1
    assert told["max_lora_rank"] == 16 and told["lora_target_modules"] == ["q_proj", "v_proj"]
