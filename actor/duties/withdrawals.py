"""Notices tickets that the learner withdrew: losers of a race, prompts that another one replaced."""

import asyncio

from absl import logging

from actor.loop import Actor

LEASED_POLL_S = 0.05
"""How often the store is asked what is leased to this actor: one read, and a loser's requests take room in the engine
that the next round wants."""


async def follow_withdrawals(actor: Actor) -> None:
    """Aborts the requests of tickets that this actor does not hold any more."""
    while True:
        await asyncio.sleep(LEASED_POLL_S)
        if not actor.held:
            continue
        held = set(actor.held)  # before the store is asked: what is claimed meanwhile is in neither
        for id_ in held - await asyncio.to_thread(actor.store.leased, actor.name):
            if id_ in actor.held:  # neither emitted nor dropped meanwhile
                logging.info("withdrawn ticket=%s", id_)
                actor.forget(id_)
