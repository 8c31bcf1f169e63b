"""Keeps the leases of what this actor holds, so that the store gives its tickets to nobody else."""

import asyncio

from absl import logging

from actor.loop import Actor


async def keep_leases(actor: Actor) -> None:
    """Renews what is held; what was taken over is given up."""
    while True:
        await asyncio.sleep(actor.limits.lease_s / 3)
        ids = list(actor.held)
        if not ids:
            continue
        kept = await asyncio.to_thread(actor.store.renew, actor.name, ids, lease_s=actor.limits.lease_s)
        for id_ in set(ids) - set(kept):
            if id_ not in actor.held:
                continue  # emitted or dropped meanwhile
            logging.warning("lease lost ticket=%s", id_)
            actor.forget(id_)
