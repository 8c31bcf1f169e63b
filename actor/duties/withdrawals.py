"""Notices tickets that the learner withdrew: losers of a race, prompts that another one replaced."""

import asyncio

from absl import logging

from actor.loop import Actor

LEASED_S = 1.0
"""How often the store is asked what is leased to this actor though it told of no change; it is one read."""


async def follow_withdrawals(actor: Actor) -> None:
    """Aborts the requests of tickets that this actor does not hold any more.

    At once: a loser's requests take room in the engine that the next round wants.
    """
    told = actor.told["tickets"]
    count = told.count
    while True:
        await told.after(count, timeout_s=LEASED_S)
        count = told.count
        if not actor.held:
            continue
        held = set(actor.held)  # before the store is asked: what is claimed meanwhile is in neither
        for id_ in held - await asyncio.to_thread(actor.store.leased, actor.name):
            if id_ in actor.held:  # neither emitted nor dropped meanwhile
                logging.info("withdrawn ticket=%s", id_)
                actor.forget(id_)
