import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.environments.environment_pool import FairSemaphore


async def settle(tasks) -> list[bool]:
    """Which have their place, when nothing moves any more."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [t.done() for t in tasks]


@pytest.mark.parametrize(
    ("total", "names", "wanted"),
    [
        (4, ["slow"], {"slow": 4}),
        (8, ["slow", "quick"], {"slow": 6, "quick": 2}),  # one in four is the other's
        (2, ["slow", "quick"], {"slow": 1, "quick": 1}),
        (1, ["slow", "quick"], {"slow": 1, "quick": 0}),
    ],
)
async def test_environment_that_holds_on_leaves_the_others_their_places(total, names, wanted):
    places = FairSemaphore(total, names)
    for name in names:
        tasks = [asyncio.create_task(places.acquire(name)) for _ in range(total + 1)]
        assert sum(await settle(tasks)) == wanted[name]


async def test_who_waits_is_served_in_order_and_a_cancelled_one_not_at_all():
    places = FairSemaphore(1, ["a"])
    await places.acquire("a")
    first, second, third = (asyncio.create_task(places.acquire("a")) for _ in range(3))
    await settle([])
    first.cancel()
    await settle([])
    places.release("a")
    assert await settle([second, third]) == [True, False]
    places.release("a")
    third.cancel()  # it was given the place just now
    await settle([])
    with contextlib.suppress(asyncio.CancelledError):
        await third
    await asyncio.wait_for(places.acquire("a"), 10)


@given(
    total=st.integers(1, 12),
    script=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "give", "stop"]))),
)
def test_places_are_never_more_than_there_are_and_come_back(total, script):
    async def body():
        places = FairSemaphore(total, "ab")
        tasks: list[tuple[str, asyncio.Task[None]]] = []
        for name, what in script:
            mine = [(n, t) for n, t in tasks if n == name]
            if what == "take":
                tasks.append((name, asyncio.create_task(places.acquire(name))))
            elif what == "stop" and mine:
                mine[-1][1].cancel()
                if not mine[-1][1].done():
                    tasks.remove(mine[-1])
            elif held := [(n, t) for n, t in mine if t.done()]:
                tasks.remove(held[0])
                places.release(name)
            await settle([])
            assert sum(t.done() for _, t in tasks) <= total
        while tasks:
            await settle([])
            done = [(n, t) for n, t in tasks if t.done()]
            assert done
            for one in done:
                tasks.remove(one)
                places.release(one[0])
        every = [asyncio.create_task(places.acquire(name)) for name in "abc" * total]
        assert sum(await settle(every)) <= total and (total < 3 or any(t.done() for t in every))

    asyncio.run(body())
