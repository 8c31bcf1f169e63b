"""Tickets taken away from an actor while it serves them."""

import asyncio

import numpy as np
import pytest

from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup, run


def test_a_withdrawn_tickets_requests_are_aborted_and_its_slot_is_free(tmp_path):
    async def body():
        s = make_setup(tmp_path, width=1)
        s.publish(0)
        s.put(0, 1)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.store.withdraw(["t0"])
            await s.runs("t1.0", "t1.1")
            assert list(s.actor.held) == ["t1"]

    run(body())


def test_a_ticket_replaced_while_it_is_served_is_served_anew(tmp_path):
    async def body():
        s = make_setup(tmp_path, width=1)
        s.publish(0)
        s.put(0)
        async with s.serving():
            await s.runs("t0.0", "t0.1")
            s.store.withdraw(["t0"])
            s.put(0, prompt_tokens=np.array([5], np.int32))
            await until(lambda: [list(t.prompt_tokens) for t in s.actor.held.values()] == [[5]], "the new prompt")
            await s.runs("t0.0", "t0.1")

    run(body())


@pytest.mark.parametrize("last_first", [False, True])
def test_a_sample_that_ends_in_the_moment_its_ticket_is_withdrawn_does_no_harm(tmp_path, last_first):
    async def body():
        s = make_setup(tmp_path, width=1)
        s.publish(0)
        s.put(0, 1)
        async with s.serving() as serving:
            await s.runs("t0.0", "t0.1")
            if last_first:
                s.engine.finish("t0.1")
            s.engine.finish("t0.0")  # its task is ready to run, and has not yet
            s.store.withdraw(["t0"])
            s.actor.forget("t0")
            await s.runs("t1.0", "t1.1")
            assert not serving.done() and s.groups() == []

    run(body())


def test_a_ticket_put_anew_waits_for_the_end_of_the_one_it_replaces(tmp_path, monkeypatch):
    """The engine's abort takes a while, and the new ticket is claimed meanwhile, under the same id."""

    async def body():
        s = make_setup(tmp_path, width=2)
        monkeypatch.setattr(s.store, "leased", lambda name: set(s.actor.held))  # only the claim may notice
        s.publish(0)
        s.put(0)
        async with s.serving() as serving:
            await s.runs("t0.0", "t0.1")
            s.engine.abort_ends = asyncio.Event()
            s.store.withdraw(["t0"])
            s.put(0, prompt_tokens=np.array([5], np.int32))
            await until(lambda: len(s.engine.aborted) == 2, "the abort")
            await until(lambda: s.store.counts()["claimed"] == 1, "the claim")
            s.engine.abort_ends.set()
            await until(lambda: "t0" in s.actor.held and len(s.running()) == 2, "the new one runs")
            s.engine.finish("t0.0")
            s.engine.finish("t0.1")
            await until(lambda: len(s.groups()) == 1, "the group")
            assert not serving.done()
        assert s.groups()[0].prompt_tokens.tolist() == [5]

    run(body())
