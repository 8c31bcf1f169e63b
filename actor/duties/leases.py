"""Keeps the leases of what this actor holds, and ends what it serves without one.

A lease ends when the learner withdraws its ticket (the loser of a race, a prompt that another one replaced), and when
another actor has the ticket, because this one said nothing for too long.
"""

import asyncio
from collections.abc import Iterable

from absl import logging

from actor.loop import Actor

LEASED_S = 1.0
"""How often the store is asked what is leased to this actor though it told of no change; it is one read."""


async def keep_leases(actor: Actor) -> None:
    """Renews what is held, and what is on its way to the store."""
    while True:
        await asyncio.sleep(actor.limits.lease_s / 3)
        ids = actor.holdings.to_renew
        if ids:
            kept = await asyncio.to_thread(actor.store.renew, actor.name, ids, lease_s=actor.limits.lease_s)
            _forget(actor, set(ids) - set(kept), why="lease lost")


async def follow_withdrawals(actor: Actor) -> None:
    """Aborts the requests of tickets that this actor does not hold any more.

    At once: a loser's requests take room in the engine that the next round wants.
    """
    told = actor.told["tickets"]
    count = told.count
    while True:
        await told.after(count, timeout_s=LEASED_S)
        count = told.count
        held = set(actor.held)  # before the store is asked: what is claimed meanwhile is in neither
        if held:
            leased = await asyncio.to_thread(actor.store.leased, actor.name)
            _forget(actor, held - leased, why="withdrawn")


def _forget(actor: Actor, ticket_ids: Iterable[str], *, why: str) -> None:
    for id_ in ticket_ids:
        if id_ in actor.held:  # neither emitted nor dropped while the store was asked
            logging.info("%s ticket=%s", why, id_)
            actor.forget(id_)
