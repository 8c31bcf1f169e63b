"""How an actor leaves in order: to be started again with another engine, or because it was told to end."""

import time

from absl import logging

from actor.loop import Actor

_LOOK_S = 0.5
"""How often what is left is looked at though no request ended: a group's last reward comes later."""


async def leave(actor: Actor) -> None:
    """Takes nothing new, gives back what has not begun, and waits for the groups in progress to be stored."""
    start_s = time.monotonic()
    actor.leave()
    logging.info("actor leaves groups=%d", actor.num_groups)
    while actor.num_groups or actor.admission.waiting:
        count = actor.group_ended.count
        if actor.admission.waiting:
            await actor.give_back_waiting()
        if actor.num_groups:
            await actor.group_ended.after(count, timeout_s=_LOOK_S)
    actor.timeline.took("leave", start_s, time.monotonic())
