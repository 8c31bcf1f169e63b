"""Hears what the store tells of changes, so that nothing here has to ask again and again."""

import asyncio
from typing import NoReturn

from actor.loop import Actor
from bridge.store.protocol import Topic

HEARD: tuple[Topic, ...] = ("tickets", "weights", "run")
"""What an actor acts on: not what others hand in or claim."""
WAIT_S = 0.5
"""For how long the store is waited for at once: as long as this thread outlives the actor at most."""
GAP_S = 0.005
"""Between two rings: in a storm of changes the store is read once for many."""


async def follow_store(actor: Actor) -> NoReturn:
    """Rings the actor's bells when something in the store may have changed; waits in a thread."""
    mark = await asyncio.to_thread(actor.store.mark)
    while True:
        await asyncio.to_thread(actor.store.wait, mark, HEARD, timeout_s=WAIT_S)
        now = await asyncio.to_thread(actor.store.mark)
        actor.hear(topic for topic in HEARD if now[topic] != mark[topic])
        mark = now
        await asyncio.sleep(GAP_S)
