"""An elastic actor: its bound follows the load, and for other limits it leaves with nothing lost."""

import asyncio
import dataclasses
import functools
import types
from typing import Any

import numpy as np
import pytest

from actor.elastic import ElasticBounds, ElasticPolicy
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
from tests.actor.loop_setup import ended, make_setup, run
from tests.bridge.factories import make_ticket

DEFAULT = EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=1)
OTHER = EngineSizeOverride(max_num_seqs=4, tensor_parallel_size=1)


def limits_file(root) -> EngineSizeFile:
    return EngineSizeFile(root / "limits" / "actor-0.json", default=DEFAULT, max_tensor_parallel_size=2)


def elastic_share(engine, *, max_tensor_parallel_size: int) -> ElasticPolicy:
    return ElasticPolicy(
        size=engine.size,
        bounds=ElasticBounds(min_sequences=2, max_sequences=8, max_tensor_parallel_size=max_tensor_parallel_size),
        max_sequences=8,
        tensor_parallel_size=1,
    )


def resizing(file, share=None):
    return functools.partial(elastic_control_loop, file=file, share=share)


@pytest.mark.heavy
def test_limits_written_meanwhile_end_the_actor_once_its_groups_are_in(tmp_path, monkeypatch):
    async def body():
        s, file = make_setup(tmp_path, width=2), limits_file(tmp_path)
        claimed, claim = [], s.store.claim

        def recorded(*arguments, **fields):
            tickets = claim(*arguments, **fields)
            claimed.extend(t.id for t in tickets)
            return tickets

        monkeypatch.setattr(s.store, "claim", recorded)
        s.publish(0)
        s.put(0, 1, 2, 3)
        async with s.serving(resizing(file)) as serving:
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            file.write(OTHER)
            await until(lambda: s.actor.is_shutting_down, "it leaves")
            for id_ in ("t0.0", "t0.1"):
                s.engine.finish(id_)
            await until(lambda: len(s.groups()) == 1, "the first group")
            await s.served(s.publish(1))  # weights are followed to the end
            await s.runs("t1.0", "t1.1")  # and nothing new started in the free slot
            assert not serving.done()
            for id_ in ("t1.0", "t1.1"):
                s.engine.finish(id_)
            request = await ended(serving)
            assert isinstance(request, ResizeRequest) and "max_num_seqs=4" in str(request)
            assert not s.running()
        assert sorted(g.order for g in s.groups()) == [0, 1]
        assert s.engine.aborted == [] and claimed == ["t0", "t1"]
        counts = s.store.counts()
        assert (counts["open"], counts["claimed"], counts["reissued"]) == (2, 0, 0)

    run(body())


def test_waiting_tickets_are_given_back_at_once(tmp_path):
    async def body():
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

    run(body())


@pytest.mark.parametrize("text", ['{"max_num_seqs": 8}', '{"max_num_seqs": -1}', "what"])
def test_same_or_bad_limits_change_nothing(tmp_path, text):
    async def body():
        s, file = make_setup(tmp_path, auto=True), limits_file(tmp_path)
        file.path.parent.mkdir()
        file.path.write_text(text)
        s.publish(0)
        async with s.serving(resizing(file)) as serving:
            s.put(0, 1)
            await until(lambda: len(s.groups()) == 2, "both groups")
            assert not serving.done() and not s.actor.is_shutting_down

    run(body())


async def two_steps(s, share) -> None:
    """Eight responses by the first weights without preemptions, eight by the next with 24."""
    observed = {
        1: lambda: [s.num_preempted for s in share.last_of_kind.values()] == [0],
        2: lambda: share.max_sequences == 6 or share.tensor_parallel_size == 2,
    }
    for step, num_preempted in ((1, 0), (2, 24)):
        await until(lambda: len(s.running()) == 8, "the engine is full")
        s.engine.num_preempted = num_preempted
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda at=8 * step: s.engine.num_finished == at, "they ended")
        await s.served(s.publish(step))
        await until(observed[step], f"step {step} was observed")


@pytest.mark.heavy
def test_preemptions_lower_what_runs_at_once_while_the_engine_runs_on(tmp_path):
    async def body():
        s, file = make_setup(tmp_path, policy="window", width=8), limits_file(tmp_path)
        s.engine.recent_lengths = np.array([[4, 10]] * 8, np.int32)
        s.publish(0)
        s.put(*range(20))
        share = elastic_share(s.engine, max_tensor_parallel_size=1)
        async with s.serving(resizing(file, share)) as serving:
            await two_steps(s, share)
            num_finished = s.engine.num_finished + len(s.running())
            for id_ in s.running():  # some of them may have begun before the bound
                s.engine.finish(id_)
            await until(lambda: s.engine.num_finished == num_finished, "they ended")
            await until(lambda: len(s.running()) == 6, "six run")
            assert s.actor.admission.max_sequences == 6 and s.actor.admission.num_to_claim() == 0
            assert not serving.done() and not file.path.exists()

    run(body())


@pytest.mark.heavy
def test_rise_of_preemptions_asks_for_twice_the_devices(tmp_path):
    async def body():
        s, file = make_setup(tmp_path, policy="window", width=8), limits_file(tmp_path)
        s.engine.recent_lengths = np.array([[4, 10]] * 8, np.int32)
        s.publish(0)
        s.put(*range(20))
        share = elastic_share(s.engine, max_tensor_parallel_size=2)
        async with s.serving(resizing(file, share)) as serving:
            await two_steps(s, share)
            await until(lambda: s.actor.is_shutting_down, "it leaves for the other size")
            assert file.read() == EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=2)
            while s.running():
                for id_ in s.running():
                    s.engine.finish(id_)
                await asyncio.sleep(0)
            request = await ended(serving)
            assert isinstance(request, ResizeRequest) and "tensor_parallel_size=2" in str(request)
        assert s.engine.aborted == [] and s.store.counts()["claimed"] == 0
        assert len(s.groups()) + s.store.counts()["open"] == 20

    run(body())


class WatchedEngine:
    """What `observe` looks at: counters that a test moves on, round by round."""

    def __init__(self, size: int) -> None:
        self.size = EngineSize(
            max_num_seqs=256, tensor_parallel_size=size, kv_tokens=400_000, weights_kv_tokens=100_000
        )
        self.recent_lengths = np.array([[100, 100]] * 8, np.int32)
        self.version = Version(incarnation=0, step=0)
        self.num_finished = self.num_preempted = 0

    @property
    def stats(self) -> EngineStats:
        counts = dict.fromkeys((f.name for f in dataclasses.fields(EngineStats)), 0)
        counts |= {"num_finished": self.num_finished, "num_preempted": self.num_preempted}
        return EngineStats(**counts)


def sizes_asked_for(rounds, *, size=1, by_round=True) -> list[int]:
    """The tensor parallel sizes that `observe` asks for over (is a race, responses, preemptions) of rounds."""
    engine, asked = WatchedEngine(size), []
    share = ElasticPolicy(
        size=engine.size,
        bounds=ElasticBounds(min_sequences=256, max_sequences=256, max_tensor_parallel_size=8),
        max_sequences=256,
        tensor_parallel_size=size,
        by_round=by_round,
    )
    admission = types.SimpleNamespace(num_sequences=256, in_service=[])
    actor: Any = types.SimpleNamespace(engine=engine, admission=admission)
    file: Any = types.SimpleNamespace(write=lambda limits: asked.append(limits.tensor_parallel_size))
    race, calm = (make_ticket("t", num_samples=8, num_requests=n) for n in (10, 8))
    evaluation = make_ticket("e", kind="eval", num_samples=1)
    step = StepLoad(engine.version, engine.stats, engine.stats)
    was_race = False
    for number, (is_race, num_finished, num_preempted) in enumerate(rounds):
        engine.version = Version(incarnation=0, step=number)
        # The first look finds what is left of the round before, the last one an evaluation alone.
        looks = [[race if was_race else calm], *[[race if is_race else calm, evaluation]] * 4, [evaluation]]
        for index, admission.in_service in enumerate(looks):
            if 1 <= index <= 4:
                engine.num_finished += num_finished // 4
                engine.num_preempted += num_preempted // 4
            step = observe(actor, file, share, step)
        was_race = is_race
    return asked


PERIOD = [(True, 100)] * 4 + [(False, 60)]
"""Four short rounds and a long one: preemptions of 148 responses."""


@pytest.mark.parametrize("num_finished", [8, 60, 148, 256, 1024])
def test_steady_load_asks_for_no_other_size_however_few_responses_a_round_has(num_finished):
    assert sizes_asked_for([(race, num_finished, n) for race, n in PERIOD * 5]) == []


def test_shares_of_a_round_that_vary_ask_for_no_other_size():
    shares = [148, 172, 120, 160, 136, 200, 88]
    rounds = [(race, shares[i % 7], shares[i % 7] * n // 100 * 4) for i, (race, n) in enumerate(PERIOD * 7)]
    assert sizes_asked_for(rounds) == []


def test_more_preemptions_in_long_rounds_ask_for_twice_the_devices():
    rounds = [(race, 1480, 10 * n) for race, n in [*PERIOD, *PERIOD[:4], (False, 80), (True, 100)]]
    assert sizes_asked_for(rounds) == [2]


def test_round_without_a_response_is_no_quiet_one():
    quiet, empty = (False, 40, 0), (False, 0, 0)
    assert sizes_asked_for([quiet, quiet, quiet, empty, empty], size=2) == []
    assert sizes_asked_for([quiet, quiet, quiet, empty, quiet, empty], size=2) == [1]


def test_step_of_a_window_ends_with_its_last_response_if_new_weights_came_since_it_began():
    engine = WatchedEngine(1)
    share = ElasticPolicy(
        size=engine.size,
        bounds=ElasticBounds(min_sequences=256, max_sequences=256, max_tensor_parallel_size=1),
        max_sequences=256,
        tensor_parallel_size=1,
        by_round=False,
    )
    admission = types.SimpleNamespace(num_sequences=256, in_service=[])
    actor: Any = types.SimpleNamespace(engine=engine, admission=admission)
    file: Any = None
    step, steps = StepLoad(engine.version, engine.stats, engine.stats), []
    # The first step has its 256 responses before any new weights; the second has its new weights after 60 of them.
    for engine.num_finished, version in ((300, 0), (340, 1), (400, 2), (590, 2), (600, 2), (900, 2)):
        engine.version = Version(incarnation=0, step=version)
        step = observe(actor, file, share, step)
        steps.append([s.num_finished for s in share.last_of_kind.values()])
    assert steps == [[], [340], [340], [340], [260], [260]]


def test_window_has_no_rounds_and_a_step_is_a_full_engine_of_responses():
    rounds = [(False, 64, n) for n in (0, 40) * 12]
    assert sizes_asked_for(rounds, by_round=False) == []
