"""What an actor does beside its loop: follow the weights, keep leases, give signs of life, watch the engine."""

import asyncio
import os
import time
from typing import TYPE_CHECKING

from absl import logging

from actor.engine.protocol import EngineDeadError
from bridge.types import ActorReport, Heartbeat, Ticket, Version, WeightManifest

if TYPE_CHECKING:
    from actor.loop import Actor

POLL_S = 0.02
"""How often the announced version is looked at: one small file."""
_WATCH_S = 1.0


async def follow_weights(actor: "Actor") -> None:
    """Puts each announced version into service.

    Raises:
      EngineDeadError: an update failed half-way, or hung.
      WeightLoadError: the announced version was refused for minutes.
    """
    while True:
        manifest = await actor.weights.prefetch()
        if manifest is not None:
            await _replace(actor, manifest)
        actor.weights.check_hope()
        if actor.weights.is_stuck and actor.admission.waiting:
            await give_back_waiting(actor)
        await asyncio.sleep(POLL_S)


async def _replace(actor: "Actor", manifest: WeightManifest) -> None:
    """Swaps; before that running requests end (publish.at_publish=drain), or start anew if their future is gone."""
    newest: WeightManifest | None = manifest
    if actor.drains and not _is_abandoned(actor, manifest):
        newest = await _drain(actor, manifest)
    restarting = await _abandon(actor, newest) if newest is not None and _is_abandoned(actor, newest) else []
    if newest is not None:
        try:
            async with asyncio.timeout(actor.limits.swap_s):
                await actor.weights.swap(newest)
        except TimeoutError as e:
            raise EngineDeadError(f"a weight update took longer than {actor.limits.swap_s} s") from e
    actor.admission.offer(t for t in restarting if t.id in actor.held)
    actor.is_replacing = False
    actor.changed.set()
    await _say_alive(actor)  # at once: the learner waits for actors that serve its weights


async def _drain(actor: "Actor", manifest: WeightManifest) -> WeightManifest | None:
    """Lets running requests end under the old weights while nothing new starts.

    It takes as long as the longest response, so what is published meanwhile is prefetched too. Returns the
    newest version; None if that could not be fetched.
    """
    start_s = time.time()
    newest: WeightManifest | None = manifest
    actor.is_replacing = True
    while actor.admission.num_sequences and not (newest is not None and _is_abandoned(actor, newest)):
        await asyncio.sleep(POLL_S)
        newest = await actor.weights.prefetch()
    actor.timeline.span("drain", start_s, time.time(), version=str(newest.version if newest else manifest.version))
    return newest


def _is_abandoned(actor: "Actor", manifest: WeightManifest) -> bool:
    """Whether the served weights belong to a future that the learner went back behind.

    A learner that went back to a checkpoint publishes under a higher incarnation with a step that may
    lie before the served one, and train on from there before this actor hears of it. Tokens of steps that the
    new learner never made must reach no group, so unless it is at the very step served, every group in
    progress starts again from its prompt.
    """
    old, new = actor.engine.version, manifest.version
    return old is not None and new.incarnation != old.incarnation and new.step != old.step


async def _abandon(actor: "Actor", manifest: WeightManifest) -> list[Ticket]:
    """Ends every group in progress; returns the tickets that start again."""
    actor.is_replacing = True
    restarting = [actor.held[id_] for id_ in actor.groups if id_ in actor.held]
    tasks = list(actor.groups.values())
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    old, new = actor.engine.version, manifest.version
    actor.timeline.instant("abandoned", old=str(old), new=str(new), groups=len(tasks))
    logging.warning("future abandoned old=%s new=%s groups=%d", old, new, len(tasks))
    return restarting


async def give_back_waiting(actor: "Actor") -> None:
    """Other actors may have the weights that these tickets want."""
    tickets = actor.admission.waiting
    for ticket in tickets:
        actor.admission.remove(ticket.id)
        actor.held.pop(ticket.id, None)
    await asyncio.to_thread(actor.store.release, actor.name, [t.id for t in tickets])


async def keep_leases(actor: "Actor") -> None:
    """Renews what is held; what was taken over is given up."""
    while True:
        await asyncio.sleep(actor.limits.lease_s / 3)
        ids = list(actor.held)
        if not ids:
            continue
        kept = await asyncio.to_thread(actor.store.renew, actor.name, ids, lease_s=actor.limits.lease_s)
        for id_ in set(ids) - set(kept):
            if actor.held.pop(id_, None) is None:
                continue  # emitted or dropped meanwhile
            logging.warning("lease lost ticket=%s", id_)
            actor.forget(id_)


async def beat(actor: "Actor") -> None:
    """Says that this actor lives, and hears who else does."""
    while True:
        await _say_alive(actor)
        await asyncio.sleep(actor.limits.heartbeat_s)


async def watch(actor: "Actor") -> None:
    """Finds an engine that hangs.

    Raises:
      EngineDeadError: it has requests and sampled nothing for `limits.stall_s`.
    """
    num_tokens, since = -1, time.monotonic()
    while True:
        now = time.monotonic()
        is_busy = actor.admission.num_sequences > 0
        if not is_busy or actor.engine.num_sampled_tokens != num_tokens:
            num_tokens, since = actor.engine.num_sampled_tokens, now
        elif now - since > actor.limits.stall_s:
            raise EngineDeadError(
                f"the engine has hung: no token for {actor.limits.stall_s} s "
                f"with {actor.admission.num_sequences} requests"
            )
        await asyncio.sleep(min(_WATCH_S, actor.limits.stall_s / 4))


async def _say_alive(actor: "Actor") -> None:
    stats = actor.engine.stats
    report = ActorReport(
        **actor.weights.timings,
        num_refused_snapshots=actor.weights.num_refused,
        num_in_service=len(actor.admission.in_service),
        num_waiting=len(actor.admission.waiting),
        is_leaving=actor.is_leaving,
        num_groups=actor.num_emitted,
        num_dropped_groups=actor.num_dropped,
        num_sampled_tokens=stats.num_sampled_tokens,
        num_emitted_tokens=actor.num_emitted_tokens,
        max_sequences=actor.admission.max_sequences,
        num_running=stats.num_running,
        num_engine_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        kv_usage_peak=stats.kv_usage_peak,
        num_preempted=stats.num_preempted,
    )
    await asyncio.to_thread(actor.store.heartbeat, heartbeat(actor.name, actor.engine.version, report))
    beats = await asyncio.to_thread(actor.store.heartbeats)
    horizon = time.time() - 5 * actor.limits.heartbeat_s
    serving = {
        b.process
        for b in beats
        if b.role == "actor" and b.version and b.time_s > horizon and not (b.report and b.report.is_leaving)
    }
    actor.num_actors = len(serving | {actor.name})


ALL = (follow_weights, keep_leases, beat, watch)


def heartbeat(name: str, version: Version | None, report: ActorReport | None) -> Heartbeat:
    """A sign of life; without a report while the engine starts."""
    return Heartbeat(
        process=name,
        role="actor",
        pid=os.getpid(),
        time_s=time.time(),
        version=version,
        report=report,
    )
