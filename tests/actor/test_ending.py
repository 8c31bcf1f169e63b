"""An actor that hears of its run's end, with a made-up engine and a real store."""

import pytest

from actor.background import RunFinished, watch_run_end
from tests.actor.fakes import until
from tests.actor.loop_setup import ended, make_setup


@pytest.mark.heavy
async def test_actor_gives_back_what_it_has_and_ends_when_its_run_is_finished(tmp_path):
    s = make_setup(tmp_path)
    s.store.acquire_leadership("here", lease_s=30)
    s.publish(0)
    s.put(0, 1)
    async with s.serving(watch_run_end) as serving:
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.store.finish(0)
        error = await ended(serving)
    assert isinstance(error, RunFinished) and "0:0" in str(error)
    assert len(s.engine.aborted) == 4 and s.store.counts()["open"] == 2


async def test_actor_whose_learner_only_left_serves_on(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.store.acquire_leadership("here", lease_s=30)
    s.publish(0)
    async with s.serving(watch_run_end) as serving:
        s.store.release_leadership()
        s.put(0)
        await until(lambda: len(s.groups()) == 1, "it serves")
        assert not serving.done()
