"""Signs of life: the heartbeats of this actor and of the others, and a watch on its engine."""

import asyncio
import collections
import os
import time

from actor.engine.protocol import EngineDeadError
from actor.loop import Actor
from bridge.types import ActorReport, Heartbeat, Version
from bridge.watched_time import MAX_LOOK_S, WatchedTime


async def beat(actor: Actor) -> None:
    """Says that this actor lives, and hears who else does."""
    while True:
        await say_alive(actor)
        await asyncio.sleep(actor.limits.heartbeat_s)


async def watch(actor: Actor) -> None:
    """Finds an engine that has died, whatever waits for it just then, or that hangs.

    Raises:
      EngineDeadError: its processes have ended, or it has requests and sampled nothing for `limits.stall_s`.
    """
    watched = WatchedTime()
    num_tokens, since = -1, 0.0
    while True:
        now = watched.look()
        if actor.engine.is_dead:
            raise EngineDeadError("the engine's processes have ended")
        # Episodes that are in their environments ask the engine for nothing; a weight update has a bound of its own.
        is_busy = actor.engine.num_requests > 0 and not actor.weights.is_swapping
        if not is_busy or actor.engine.num_sampled_tokens != num_tokens:
            num_tokens, since = actor.engine.num_sampled_tokens, now
        elif now - since > actor.limits.stall_s:
            raise EngineDeadError(
                f"the engine has hung: no token for {actor.limits.stall_s} s with {actor.engine.num_requests} requests"
            )
        await asyncio.sleep(min(MAX_LOOK_S / 2, actor.limits.stall_s / 4))


async def say_alive(actor: Actor) -> None:
    """One heartbeat, and a look at how many engines serve: they share the tickets."""
    async with actor.saying:
        await _say_alive(actor)


async def _say_alive(actor: Actor) -> None:
    stats, tally, rewards = actor.engine.stats, actor.serving.tally, actor.serving.rewards
    failures = actor.sampler.failures
    report = ActorReport(
        **actor.weights.timings,
        num_refused_snapshots=actor.weights.num_refused,
        num_in_service=len(actor.admission.in_service),
        num_waiting=len(actor.admission.waiting),
        is_leaving=actor.is_leaving,
        num_groups=tally.num_emitted,
        num_dropped_groups=tally.num_dropped,
        num_verifier_failures=rewards.num_failures,
        num_judge_retries=rewards.num_judge_retries,
        num_judge_failures=rewards.num_judge_failures,
        num_episode_failures=actor.sampler.num_failures,
        num_episode_deadlines=failures["deadline"],
        num_episode_crashes=failures["crash"],
        num_episode_exceptions=failures["exception"],
        num_episode_bad_replies=failures["reply"],
        num_episode_bad_starts=failures["start"],
        num_sampled_tokens=stats.num_sampled_tokens,
        num_emitted_tokens=tally.num_emitted_tokens,
        max_sequences=actor.admission.places,
        num_running=stats.num_running,
        num_engine_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        kv_usage_peak=stats.kv_usage_peak,
        num_preempted=stats.num_preempted,
    )
    version = actor.engine.version
    await asyncio.to_thread(actor.store.heartbeat, heartbeat(actor.name, version, report))
    serves = version is not None and not report.is_leaving
    engines = collections.Counter(await asyncio.to_thread(actor.store.engines, anew=serves and not actor.is_counted))
    if not serves or not engines:
        engines[report.max_sequences] += 1  # itself: as soon as it serves, or where its own sign came too late
    actor.share_among(engines, is_counted=serves)


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
