"""An elastic actor: steps of its load, and for another size it leaves with nothing lost."""

import functools
import types
from typing import Any

import pytest

from actor.elastic import ElasticPolicy, StepStats
from actor.elastic_control import (
    EngineSizeFile,
    EngineSizeOverride,
    ResizeRequest,
    StepLoad,
    elastic_control_loop,
    observe,
)
from actor.engine_protocol import EngineSize, EngineStats
from bridge.rollout_types import Version
from tests.actor.fakes import until
from tests.actor.loop_setup import ended, make_setup

DEFAULT = EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=1)
OTHER = EngineSizeOverride(max_num_seqs=4, tensor_parallel_size=1)


def limits_file(root) -> EngineSizeFile:
    return EngineSizeFile(root / "limits" / "actor-0.json", default=DEFAULT, max_tensor_parallel_size=2)


def policy_of(engine, *, max_tensor_parallel_size: int) -> ElasticPolicy:
    return ElasticPolicy(
        size=engine.size, max_tensor_parallel_size=max_tensor_parallel_size, restart_s=0.0, by_round=False
    )


def resizing(file, policy=None):
    return functools.partial(elastic_control_loop, file=file, policy=policy)


async def test_limits_written_meanwhile_end_the_actor_which_hands_its_groups_over(tmp_path, monkeypatch):
    s, file = make_setup(tmp_path, width=2), limits_file(tmp_path)
    begun, sample = [], s.engine.sample

    async def recorded(*arguments, request_id, **fields):
        begun.append(request_id)
        return await sample(*arguments, request_id=request_id, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(s.engine, "sample", recorded)
        s.publish(0)
        s.put(0, 1, 2, 3)
        async with s.serving(resizing(file)) as serving:
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            s.engine.step("t0.0", 4)
            s.engine.finish("t0.1")
            file.write(OTHER)
            request = await ended(serving)
            assert isinstance(request, ResizeRequest) and "max_num_seqs=4" in str(request)
            assert not s.running()
    assert s.groups() == [] and sorted(begun) == ["t0.0", "t0.1", "t1.0", "t1.1"]  # and nothing new meanwhile
    counts = s.store.counts()
    assert (counts["open"], counts["claimed"], counts["reissued"]) == (4, 0, 0)
    first, *_ = s.store.claim("next", limit=1, lease_s=60)
    assert first.progress is not None
    assert {r.index: r.finish for r in first.progress.requests} == {0: None, 1: "stop"}


async def test_waiting_tickets_are_given_back_at_once(tmp_path):
    s, file = make_setup(tmp_path, width=1), limits_file(tmp_path)
    v0 = s.publish(0)
    s.put(0)
    s.put(1, min_version=type(v0)(incarnation=0, step=9))
    async with s.serving(resizing(file)) as serving:
        await s.runs("t0.0", "t0.1")
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: "t1" in s.actor.held, "it waits in hand")
        file.write(OTHER)
        assert isinstance(await ended(serving), ResizeRequest)
        assert s.store.counts()["open"] == 1 and not s.actor.held


@pytest.mark.parametrize("text", ['{"max_num_seqs": 8}', '{"max_num_seqs": -1}', "what"])
async def test_same_or_bad_limits_change_nothing(tmp_path, text):
    s, file = make_setup(tmp_path, auto=True), limits_file(tmp_path)
    file.path.parent.mkdir()
    file.path.write_text(text)
    s.publish(0)
    async with s.serving(resizing(file)) as serving:
        s.put(0, 1)
        await until(lambda: len(s.groups()) == 2, "both groups")
        assert not serving.done() and not s.actor.is_shutting_down


@pytest.mark.heavy
async def test_full_cache_asks_for_twice_the_devices(tmp_path):
    s, file = make_setup(tmp_path, policy="window", width=8), limits_file(tmp_path)
    s.publish(0)
    s.put(*range(20))
    policy = policy_of(s.engine, max_tensor_parallel_size=2)
    async with s.serving(resizing(file, policy)) as serving:
        await until(lambda: len(s.running()) == 8, "the engine is full")
        s.engine.num_preempted = 24
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: s.engine.num_finished == 8, "they ended")
        s.publish(1)
        await until(lambda: s.actor.is_shutting_down, "it leaves for the other size")
        assert file.read() == EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=2)
        request = await ended(serving)
        assert isinstance(request, ResizeRequest) and "tensor_parallel_size=2" in str(request)
    assert s.store.counts()["claimed"] == 0
    assert len(s.groups()) + s.store.counts()["open"] == 20


class WatchedEngine:
    """What `observe` looks at: counters that a test moves on."""

    def __init__(self, size: int = 1) -> None:
        self.size = EngineSize(
            max_num_seqs=256, tensor_parallel_size=size, kv_tokens=400_000, weights_kv_tokens=100_000
        )
        self.version = Version(incarnation=0, step=0)
        self.num_finished = self.num_preempted = 0
        self.kv_usage_peak = 0.0

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=0,
            num_waiting=0,
            kv_usage=0.0,
            kv_usage_peak=self.kv_usage_peak,
            num_preempted=self.num_preempted,
            num_finished=self.num_finished,
            num_sampled_tokens=0,
        )


class Recorded(ElasticPolicy):
    """A policy that keeps the steps it is given, and asks for size 8 after the last."""

    __slots__ = ("last", "steps")

    def next_size(self, step: StepStats) -> int:
        self.steps.append(step)
        return 8 if len(self.steps) == self.last else self.size.tensor_parallel_size


def steps_of(
    looks, *, by_round: bool = True, last: int = 0, write=None
) -> tuple[list[StepStats], list[EngineSizeOverride]]:
    """Returns the steps and sizes that come of looks: (second, version, responses, preemptions, peak usage)."""
    engine, written = WatchedEngine(), []
    policy = Recorded(size=engine.size, max_tensor_parallel_size=8, restart_s=0.0, by_round=by_round)
    policy.steps, policy.last = [], last
    actor: Any = types.SimpleNamespace(engine=engine)
    file: Any = types.SimpleNamespace(write=write or written.append, path="limits/actor-0.json")
    step = StepLoad(engine.version, 0.0, engine.stats, engine.stats)
    for now_s, version, engine.num_finished, engine.num_preempted, engine.kv_usage_peak in looks:
        engine.version = Version(incarnation=0, step=version)
        step = observe(actor, file, policy, step, now_s)
    return policy.steps, written


def stats(seconds: float, kv_usage_peak: float, num_preempted: int) -> StepStats:
    return StepStats(seconds=seconds, kv_usage_peak=kv_usage_peak, num_preempted=num_preempted)


def test_round_is_a_step_with_its_seconds_preemptions_and_peak():
    looks = [(1.0, 0, 5, 0, 0.8), (9.0, 0, 8, 3, 0.6), (10.0, 1, 9, 4, 0.1), (12.0, 1, 12, 4, 0.2), (15.0, 2, 20, 4, 0)]
    assert steps_of(looks) == ([stats(10.0, 0.8, 4), stats(5.0, 0.2, 0)], [])


def test_round_without_a_response_is_no_step():
    looks = [(5.0, 0, 8, 0, 0.6), (6.0, 1, 8, 0, 0.1), (50.0, 2, 8, 0, 0.1), (70.0, 2, 9, 0, 0.3), (80.0, 3, 9, 0, 0.0)]
    assert steps_of(looks) == ([stats(6.0, 0.6, 0), stats(30.0, 0.3, 0)], [])


def test_step_of_a_window_ends_with_its_last_response_if_new_weights_came_since_it_began():
    # The first step has its 256 responses before any new weights; the second has its new weights after 60 of them.
    looks = [(n, version, n, n, 0.5) for n, version in ((300, 0), (340, 1), (400, 2), (590, 2), (600, 2), (900, 2))]
    assert steps_of(looks, by_round=False)[0] == [stats(340, 0.5, 340), stats(260, 0.5, 260)]


def test_other_size_is_written_with_the_engines_sequences():
    looks = [(10.0 * n, n, n, 0, 0.5) for n in (1, 2, 3)]
    assert steps_of(looks, last=2)[1] == [EngineSizeOverride(max_num_seqs=256, tensor_parallel_size=8)]


def test_size_that_cannot_be_written_is_kept_and_the_load_counted_on():
    def full(size: EngineSizeOverride) -> None:
        raise OSError(28, "No space left on device")

    looks = [(10.0 * n, n, n, 0, 0.5) for n in (1, 2, 3)]
    assert steps_of(looks, last=2, write=full)[0] == steps_of(looks, last=2)[0]


FILE_DEFAULT = EngineSizeOverride(max_num_seqs=64, tensor_parallel_size=1)


def make(tmp_path, text: str | None = None) -> EngineSizeFile:
    path = tmp_path / "limits" / "actor-0.json"
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return EngineSizeFile(path, default=FILE_DEFAULT, max_tensor_parallel_size=4)


def test_absent_file_means_the_default_and_is_no_change(tmp_path):
    assert make(tmp_path).read() == FILE_DEFAULT and make(tmp_path).read_if_changed() is None


def test_what_is_left_out_is_the_default(tmp_path):
    assert make(tmp_path, '{"max_num_seqs": 16}').read() == EngineSizeOverride(max_num_seqs=16, tensor_parallel_size=1)
    assert make(tmp_path, '{"tensor_parallel_size": 4}').read() == EngineSizeOverride(
        max_num_seqs=64, tensor_parallel_size=4
    )


def test_written_limits_are_read_once_for_each_change(tmp_path):
    file, limits = make(tmp_path), EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=2)
    file.write(limits)
    assert file.read_if_changed() == limits and file.read_if_changed() is None
    file.write(FILE_DEFAULT)
    assert file.read_if_changed() == FILE_DEFAULT
    assert [p.name for p in file.path.parent.iterdir()] == ["actor-0.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"max_num_seqs": 16', "expected {"),
        ('{"max_num_seqs": "many"}', "Expected `int"),
        ('{"max_seqs": 16}', "max_seqs"),
        ("[]", "expected {"),
        ("\xff", "expected {"),
        ('{"max_num_seqs": 0}', "max_num_seqs must be >= 1, got 0"),
        ('{"tensor_parallel_size": 8}', "between 1 and 4 .*got 8"),
    ],
)
def test_bad_file_is_refused_in_one_line(tmp_path, text, says):
    file = make(tmp_path, text)
    with pytest.raises(ValueError, match=says) as refused:
        file.read_if_changed()
    assert str(file.path) in str(refused.value) and "\n" not in str(refused.value)
    assert file.read_if_changed() is None  # said once


def test_refused_file_is_put_aside(tmp_path):
    file = make(tmp_path, '{"max_num_seqs": 16}')
    assert file.refuse() and file.refused_path.is_file() and file.read() == FILE_DEFAULT
    assert not file.refuse()
