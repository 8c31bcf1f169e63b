"""Background tasks: store events, lease renewal, withdrawals, heartbeat, engine watchdog, end of run, shutdown.

A lease ends early in two cases. The learner withdraws the ticket (a race loser, or a replaced prompt), or another actor
claims it after this one failed to renew in time.
"""

import asyncio
import collections
import os
import time
from collections.abc import Iterable
from typing import NoReturn

from absl import logging

from actor.engine_protocol import EngineDeadError
from actor.loop import Actor
from bridge.heartbeat_types import ActorReport, Heartbeat
from bridge.liveness import MAX_LOOK_S, WatchedTime
from bridge.rollout_types import Version
from bridge.store.store_types import Finished, Topic

HEARD: tuple[Topic, ...] = ("tickets", "weights", "run")
"""Topics an actor reacts to; groups and claims of other processes are ignored."""
WAIT_S = 0.5
"""Timeout of one blocking store wait, in seconds; bounds how long its thread outlives the actor."""
CHANGES_GAP_S = 0.005
"""Minimum time between two store events, in seconds. It batches bursts of changes into one read."""


async def watch_store(actor: Actor) -> NoReturn:
    """Forwards store changes to the actor's notifiers. Blocking store waits run in a thread."""
    mark = await asyncio.to_thread(actor.store.mark)
    while True:
        await asyncio.to_thread(actor.store.wait, mark, HEARD, timeout_s=WAIT_S)
        now = await asyncio.to_thread(actor.store.mark)
        actor.on_store_event(topic for topic in HEARD if now[topic] != mark[topic])
        mark = now
        await asyncio.sleep(CHANGES_GAP_S)


LOOK_S = 10.0
"""Interval of the run-finished check without a store event, in seconds. Each check is one read."""
GAP_S = 0.5
"""Minimum time between two run-finished checks, in seconds. It batches bursts of store events."""


class RunFinished(Exception):  # noqa: N818  # nothing went wrong
    """Raised when the run is finished: the actor releases its tickets and exits."""

    def __init__(self, finished: Finished) -> None:
        super().__init__(f"its last version is {finished.version}")


async def watch_run_end(actor: Actor) -> NoReturn:
    """Raises RunFinished once the learner marked the run as finished. Actors of a dead learner keep waiting."""
    told = actor.store_events["run"]
    while True:
        count = told.count
        finished = await asyncio.to_thread(actor.store.finished)
        if finished is not None:
            raise RunFinished(finished)
        await asyncio.sleep(GAP_S)
        await told.wait_past(count, timeout_s=LOOK_S)


LEASED_S = 1.0
"""Interval of the withdrawal check without a store event, in seconds. Each check is one read."""


async def renew_leases(actor: Actor) -> None:
    """Renews the leases of held tickets and of groups queued for submission."""
    while True:
        await asyncio.sleep(actor.limits.lease_s / 3)
        ids = actor.holdings.to_renew
        if ids:
            kept = await asyncio.to_thread(actor.store.renew, actor.name, ids, lease_s=actor.limits.lease_s)
            _forget(actor, set(ids) - set(kept), why="lease lost")


async def watch_withdrawals(actor: Actor) -> None:
    """Aborts the requests of tickets that this actor no longer leases; they occupy slots that the next round needs."""
    told = actor.store_events["tickets"]
    count = told.count
    while True:
        await told.wait_past(count, timeout_s=LEASED_S)
        count = told.count
        held = set(actor.held)  # snapshot before the read: tickets claimed meanwhile are in neither set
        if held:
            leased = await asyncio.to_thread(actor.store.leased, actor.name)
            _forget(actor, held - leased, why="withdrawn")


def _forget(actor: Actor, ticket_ids: Iterable[str], *, why: str) -> None:
    for id_ in ticket_ids:
        if id_ in actor.held:  # neither submitted nor dropped during the read
            logging.info("%s ticket=%s", why, id_)
            actor.forget(id_)


_LOOK_S = 0.5
"""Interval of the shutdown check, in seconds. A group's last reward can arrive after its last request finished."""


async def shut_down(actor: Actor) -> None:
    """Stops claiming, hands over what is in progress, and waits until sampled groups are scored and stored.

    Training tickets return to the store with what was sampled of them (`TicketServer.hand_over`); episodes, evaluations
    and probes finish.
    """
    start_s = time.monotonic()
    actor.shut_down()
    logging.info("actor shutting down groups=%d", actor.num_groups)
    while actor.num_groups or actor.admission.waiting:
        count = actor.group_ended.count
        if actor.admission.waiting:
            await actor.release_waiting()
        await actor.hand_over()  # again, because a request may have entered the engine just after its abort
        if actor.num_groups:
            await actor.group_ended.wait_past(count, timeout_s=_LOOK_S)
    actor.timeline.took("shutdown", start_s, time.monotonic())


async def heartbeat_loop(actor: Actor) -> None:
    """Sends heartbeats and updates this actor's share of the tickets."""
    while True:
        await send_heartbeat(actor)
        await asyncio.sleep(actor.limits.heartbeat_s)


async def engine_watchdog(actor: Actor) -> None:
    """Raises EngineDeadError if engine processes exited, or requests got no token for `limits.stall_s`."""
    watched = WatchedTime()
    num_tokens, since = -1, 0.0
    while True:
        now = watched.look()
        if actor.engine.is_dead:
            raise EngineDeadError("the engine's processes have exited")
        # Episodes waiting for their environments have no engine request. A weight update has its own timeout.
        is_busy = actor.engine.num_requests > 0 and not actor.weights.is_swapping
        if not is_busy or actor.engine.num_sampled_tokens != num_tokens:
            num_tokens, since = actor.engine.num_sampled_tokens, now
        elif now - since > actor.limits.stall_s:
            raise EngineDeadError(
                f"the engine hung: no token for {actor.limits.stall_s} s with {actor.engine.num_requests} requests"
            )
        await asyncio.sleep(min(MAX_LOOK_S / 2, actor.limits.stall_s / 4))


async def send_heartbeat(actor: Actor) -> None:
    """Sends one heartbeat and rebalances by the engines that now serve."""
    async with actor.heartbeat_lock:
        await _say_alive(actor)


async def _say_alive(actor: Actor) -> None:
    stats, tally, rewards = actor.engine.stats, actor.serving.tally, actor.serving.rewards
    episodes = actor.sampler.episodes
    failures = episodes.failures if episodes is not None else collections.Counter[str]()
    report = ActorReport(
        **actor.weights.timings,
        num_refused_snapshots=actor.weights.num_refused,
        num_in_service=len(actor.admission.in_service),
        num_waiting=len(actor.admission.waiting),
        is_shutting_down=actor.is_shutting_down,
        num_groups=tally.num_emitted,
        num_dropped_groups=tally.num_dropped,
        num_verifier_failures=rewards.num_failures,
        num_judge_retries=rewards.judge_counts.num_retries,
        num_judge_failures=rewards.judge_counts.num_failures,
        num_episode_failures=episodes.num_failures if episodes is not None else 0,
        num_episode_deadlines=failures["deadline"],
        num_episode_crashes=failures["crash"],
        num_episode_exceptions=failures["exception"],
        num_episode_bad_replies=failures["reply"],
        num_episode_bad_starts=failures["start"],
        num_sampled_tokens=stats.num_sampled_tokens,
        num_submitted_tokens=tally.num_submitted_tokens,
        max_sequences=actor.admission.capacity,
        num_running=stats.num_running,
        num_engine_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        kv_usage_peak=stats.kv_usage_peak,
        kv_tokens=actor.engine.size.kv_tokens,
        wake_s=actor.wake_s,
        num_preempted=stats.num_preempted,
        decode_speeds=stats.decode_speeds,
    )
    version = None if actor.is_asleep else actor.engine.version
    await asyncio.to_thread(actor.store.heartbeat, heartbeat(actor.name, version, report))
    serves = version is not None and not report.is_shutting_down
    engines = collections.Counter(
        await asyncio.to_thread(actor.store.engine_capacity, anew=serves and not actor.is_counted)
    )
    if not serves or not engines:
        # count this engine itself: it serves soon, or its heartbeat arrived too late
        engines[report.max_sequences] += 1
    actor.rebalance(engines, is_counted=serves)


def heartbeat(name: str, version: Version | None, report: ActorReport | None) -> Heartbeat:
    """Returns this process's heartbeat; `report` is None while the engine starts."""
    return Heartbeat(
        process=name,
        role="actor",
        pid=os.getpid(),
        time_s=time.time(),
        version=version,
        report=report,
    )
