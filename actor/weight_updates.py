"""Background task that keeps the newest published weights in service: in-flight update, drain, rollback.

A version is fetched and verified while requests run. The engine then swaps, and running requests continue with the new
weights (`actor.weights.client`). Four cases differ from an in-flight update:

* With publish.at_publish=drain running requests finish first.
* Requests on weights that the learner rolled back past restart.
* A fenced actor drops all its groups and refetches the weights before it serves the probe that may re-admit it.
* An engine that shares its devices with the learner (actor.colocated) or its gradient helper (helpers.num_engines)
  sleeps while the other trains.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from absl import logging

from actor.background import (
    engine_watchdog,
    heartbeat_loop,
    renew_leases,
    send_heartbeat,
    watch_store,
    watch_withdrawals,
)
from actor.engine_protocol import EngineDeadError
from actor.loop import Actor, BackgroundTask
from bridge.device_turns import POLL_S, EngineTurn
from bridge.rollout_types import Ticket
from bridge.weight_types import WeightManifest

T = TypeVar("T")
ANNOUNCED_S = 0.25
"""Interval of the weights check without a store event, in seconds. It also retries a refused version."""


async def weight_update_loop(actor: Actor) -> None:
    """Puts each announced version into service.

    Raises EngineDeadError if an update failed midway or hung, and WeightLoadError if a version was refused for minutes.
    """
    told = actor.store_events["weights"]
    while True:
        count = told.count
        if actor.turn is not None and actor.turn.is_wanted():
            await _stand_down(actor, actor.turn)
        if actor.fence.must_restart:
            await _start_over(actor)
        manifest = await actor.weights.prefetch()
        if manifest is not None:
            await _replace(actor, manifest)
        actor.weights.raise_if_refused_too_long()
        if actor.weights.is_blocked and actor.admission.waiting:
            await actor.release_waiting()  # other actors may already have the weights that these tickets require
        if manifest is None:
            await told.wait_past(count, timeout_s=ANNOUNCED_S)


async def _replace(actor: Actor, manifest: WeightManifest) -> None:
    """Swaps weights; running requests finish before (at_publish=drain) or restart if their weights were rolled back."""
    newest: WeightManifest | None = manifest
    if actor.drain_before_swap and not _is_abandoned(actor, manifest):
        newest = await _drain(actor, manifest)
    restarting = await _abandon(actor, newest) if newest is not None and _is_abandoned(actor, newest) else []
    if newest is not None:
        await _swap(actor, newest)
    restarting += await actor.abort_all(actor.sampler.stale_tickets)
    actor.resume(restarting)
    if num_stale := actor.sampler.restart_stale():
        logging.info("stale samples restarted count=%d version=%s", num_stale, actor.engine.version)
    await send_heartbeat(actor)  # immediately: the learner waits for actors that serve its weights


async def _swap(actor: Actor, manifest: WeightManifest) -> bool:
    """Puts a version into service; returns False if the engine refused it."""
    is_served = await _in_time(actor, actor.weights.swap(manifest), "a weight update")
    if is_served:
        actor.sampler.set_base_steps({v.incarnation: v.step for v in manifest.base_steps})
    return is_served


async def _in_time(actor: Actor, change: Coroutine[Any, Any, T], what: str) -> T:
    """Returns what a change of the engine returns; raises EngineDeadError if it hangs."""
    try:
        async with asyncio.timeout(actor.limits.swap_timeout_s):
            return await change
    except TimeoutError as e:
        raise EngineDeadError(f"{what} took longer than {actor.limits.swap_timeout_s} s") from e


async def _start_over(actor: Actor) -> None:
    """Discards all groups sampled before the fence, and refetches the weights."""
    actor.pause()
    await actor.drop_all()
    await _refetch(actor, until=lambda: False)
    actor.timeline.instant("started over", version=str(actor.engine.version))
    actor.fence.restarted()
    actor.resume()
    await send_heartbeat(actor)


async def _refetch(actor: Actor, *, until: Callable[[], bool]) -> bool:
    """Puts the announced version into service, whatever is served; returns False if `until` came true before."""
    actor.weights.start_over()
    told = actor.store_events["weights"]
    while not until():
        count = told.count
        manifest = await actor.weights.prefetch()
        if manifest is not None and await _swap(actor, manifest):
            return True
        actor.weights.raise_if_refused_too_long()
        await told.wait_past(count, timeout_s=ANNOUNCED_S)
    return False


async def _stand_down(actor: Actor, turn: EngineTurn) -> None:
    """Hands responses in progress over, and lets training have the shared devices until it returns them."""
    start_s = time.monotonic()
    actor.pause()
    while actor.admission.num_sequences:  # rewards and submissions go on, and need no device
        if not turn.is_wanted():
            actor.resume()
            return
        await actor.hand_over()
        await actor.sample_ended.wait_past(actor.sample_ended.count, timeout_s=ANNOUNCED_S)
    has_weights = False
    while not has_weights:  # a learner that died before it announced weights wants the devices again
        actor.fall_asleep()
        await _in_time(actor, actor.engine.sleep(), "freeing the devices")
        turn.give_back()
        await send_heartbeat(actor)
        while not turn.try_take():
            if actor.admission.waiting:  # a claim that was on its way
                await actor.release_waiting()
            await asyncio.sleep(POLL_S)
        taken_s = time.monotonic()
        await _in_time(actor, actor.engine.wake_up(), "taking the devices back")
        has_weights = await _refetch(actor, until=turn.is_wanted)
    actor.wake_up(time.monotonic() - taken_s)
    actor.timeline.took("stand down", start_s, time.monotonic(), version=str(actor.engine.version))
    actor.resume()
    await send_heartbeat(actor)


async def _drain(actor: Actor, manifest: WeightManifest) -> WeightManifest | None:
    """Lets running requests finish on the old weights; returns the newest version, None if it could not be fetched."""
    start_s = time.monotonic()
    newest: WeightManifest | None = manifest
    actor.pause()
    while actor.admission.num_sequences and not (newest is not None and _is_abandoned(actor, newest)):
        await actor.sample_ended.wait_past(actor.sample_ended.count, timeout_s=ANNOUNCED_S)
        newest = await actor.weights.prefetch()
    version = str(newest.version if newest else manifest.version)
    actor.timeline.took("drain", start_s, time.monotonic(), version=version)
    return newest


def _is_abandoned(actor: Actor, manifest: WeightManifest) -> bool:
    """Returns True if the learner rolled back past the served weights, whose tokens must not reach a group.

    True if the served step is above the base step of any later incarnation (`Version.is_abandoned`), or the manifest
    lacks base steps.
    """
    old, new = actor.engine.version, manifest.version
    if old is None or new.incarnation == old.incarnation:
        return False
    base_steps = {v.incarnation: v.step for v in getattr(manifest, "base_steps", ())}
    return new.incarnation not in base_steps or old.is_abandoned(base_steps)


async def _abandon(actor: Actor, manifest: WeightManifest) -> list[Ticket]:
    """Aborts every group in progress; returns the tickets to restart."""
    actor.pause()
    num_groups = actor.num_groups
    restarting = await actor.abort_all()
    old, new = actor.engine.version, manifest.version
    actor.timeline.instant("abandoned", old=str(old), new=str(new), groups=num_groups)
    logging.warning("rolled-back weights discarded old=%s new=%s groups=%d", old, new, num_groups)
    return restarting


BACKGROUND_TASKS: tuple[BackgroundTask, ...] = (
    watch_store,
    weight_update_loop,
    renew_leases,
    heartbeat_loop,
    engine_watchdog,
    watch_withdrawals,
)
"""Background tasks of every actor. A resizable actor also runs `elastic_control.elastic_control_loop`."""
