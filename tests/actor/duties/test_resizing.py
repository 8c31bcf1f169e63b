"""An elastic actor: its bound follows the load, and for other limits it leaves with nothing lost."""

import asyncio
import functools

import numpy as np
import pytest

from actor.duties.resizing import ResizeRequest, follow_limits
from actor.engine.elastic import Bounds, ElasticShare
from actor.engine.limits import EngineLimits, LimitsFile
from tests.actor.fakes import until
from tests.actor.loop_setup import ended, make_setup, run

DEFAULT = EngineLimits(max_num_seqs=8, tensor_parallel_size=1)
OTHER = EngineLimits(max_num_seqs=4, tensor_parallel_size=1)


def limits_file(root) -> LimitsFile:
    return LimitsFile(root / "limits" / "actor-0.json", default=DEFAULT, max_tensor_parallel_size=2)


def elastic_share(engine, *, max_tensor_parallel_size: int) -> ElasticShare:
    return ElasticShare(
        size=engine.size,
        bounds=Bounds(min_sequences=2, max_sequences=8, max_tensor_parallel_size=max_tensor_parallel_size),
        max_sequences=8,
        tensor_parallel_size=1,
    )


def resizing(file, share=None):
    return functools.partial(follow_limits, file=file, share=share)


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
            await until(lambda: s.actor.is_leaving, "it leaves")
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
            assert not serving.done() and not s.actor.is_leaving

    run(body())


async def two_steps(s, share) -> None:
    """Eight responses by the first weights without preemptions, eight by the next with three."""
    observed = {1: lambda: share.num_preempted_before == {False: 0}, 2: lambda: share.max_sequences == 6}
    for step, num_preempted in ((1, 0), (2, 3)):
        await until(lambda: len(s.running()) == 8, "the engine is full")
        s.engine.num_preempted = num_preempted
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda at=8 * step: s.engine.num_finished == at, "they ended")
        await s.served(s.publish(step))
        await until(observed[step], f"step {step} was observed")


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


def test_rise_of_preemptions_asks_for_twice_the_devices(tmp_path):
    async def body():
        s, file = make_setup(tmp_path, policy="window", width=8), limits_file(tmp_path)
        s.engine.recent_lengths = np.array([[4, 10]] * 8, np.int32)
        s.publish(0)
        s.put(*range(20))
        share = elastic_share(s.engine, max_tensor_parallel_size=2)
        async with s.serving(resizing(file, share)) as serving:
            await two_steps(s, share)
            await until(lambda: s.actor.is_leaving, "it leaves for the other size")
            assert file.read() == EngineLimits(max_num_seqs=8, tensor_parallel_size=2)
            while s.running():
                for id_ in s.running():
                    s.engine.finish(id_)
                await asyncio.sleep(0)
            request = await ended(serving)
            assert isinstance(request, ResizeRequest) and "tensor_parallel_size=2" in str(request)
        assert s.engine.aborted == [] and s.store.counts()["claimed"] == 0
        assert len(s.groups()) + s.store.counts()["open"] == 20

    run(body())
