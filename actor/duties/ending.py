"""Notices that the run is finished: its learner has done all its steps, and nobody need serve any more."""

import asyncio
from typing import NoReturn

from actor.loop import Actor
from bridge.store.protocol import Finished

LOOK_S = 10.0
"""How often the store is asked though it told of no change; it is one read."""
GAP_S = 0.5
"""Between two looks: where every change of the store may be this one, it is read once for many."""


class RunFinished(Exception):  # noqa: N818  # nothing went wrong
    """The run is finished; the actor gives back what it holds, and ends."""

    def __init__(self, finished: Finished) -> None:
        """With how it ended."""
        super().__init__(f"its last version is {finished.version}")


async def follow_end(actor: Actor) -> NoReturn:
    """Ends the actor with its run.

    Raises:
      RunFinished: the learner says so. One that only died may be started again, so its actors wait.
    """
    told = actor.told["run"]
    while True:
        count = told.count
        finished = await asyncio.to_thread(actor.store.finished)
        if finished is not None:
            raise RunFinished(finished)
        await asyncio.sleep(GAP_S)
        await told.after(count, timeout_s=LOOK_S)
