"""Engine start deadline and heartbeats, devices that are shared, and SIGTERM/SIGINT handling."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from absl import logging

from actor.background import heartbeat, shut_down
from actor.elastic_control import EngineSizeFile
from actor.loop import Actor, ActorLimits, BackgroundTask
from bridge.device_turns import HELPER, LEARNER, POLL_S, EngineTurn
from bridge.liveness import Activity, Liveness, report_phase
from bridge.processes import stop_signals
from bridge.store.sql.actor_side import ActorStore
from bridge.store.sql.base import SharedStore
from launch import cli
from launch.startup.join_run import JoinedRun


@contextlib.contextmanager
def deadline(seconds: float, limits_file: EngineSizeFile, liveness: Liveness) -> Iterator[None]:
    """Exits the process if the block takes longer than `seconds`, because a hung engine start cannot be interrupted.

    Liveness is reported at the start of the block. The watcher's own timeout is longer and never expires first.
    """

    def end() -> None:
        reason = f"engine start timed out after {seconds:.0f} s (supervision.start_timeout_s)"
        if limits_file.refuse():
            say_refused(limits_file, reason)
            os._exit(cli.RESIZE)
        print(f"error: {reason}", file=sys.stderr)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    liveness.report(Activity.STARTING)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    liveness.report(Activity.STARTING)


@contextlib.contextmanager
def heartbeats(store: SharedStore, name: str) -> Iterator[None]:
    """Sends heartbeats of an actor that does not serve yet, while the block runs."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.is_set():
            try:
                store.heartbeat(heartbeat(name, None, None))
            except Exception as e:  # the serving actor uses the same store and raises the error as well
                logging.error("heartbeat failed during engine start error=%s", e)
                return
            has_ended.wait(ActorLimits.heartbeat_s)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def release_tickets_of(store: ActorStore, dead: str) -> None:
    """Releases the tickets leased to a dead actor, so that others need not wait for its leases to expire."""
    if held := sorted(store.leased(dead)):
        store.release(dead, held)
        logging.info("tickets of a dead actor released actor=%s tickets=%d", dead, len(held))


def say_refused(file: EngineSizeFile, reason: str) -> None:
    """Reports on stderr that the requested limits were rejected, with the reason."""
    print(
        f"error: engine start failed with the limits of {file.path}: {reason}; renamed the file to "
        f"{file.refused_path.name}; using the config's limits",
        file=sys.stderr,
        flush=True,
    )


LATE_SIGNAL_S = 0.5
"""Seconds to wait for a signal after the actor ends. A signal to the process group may reach the engine first."""
GIVE_BACK_S = 5.0
"""Timeout for releasing tickets, in seconds. With an unreachable store, they become free when their leases expire."""


def take_devices(joined: JoinedRun, trainer: str | None, on_wait: Callable[[], None]) -> EngineTurn | None:
    """Waits for the devices that the engine shares with a trainer; None if it has its own.

    `trainer` is "learner" or "helper"; None is the learner with actor.colocated. `on_wait` is called repeatedly. Raises
    ValueError if the learner is on another machine.
    """
    trainer = trainer or ("learner" if joined.config.actor.colocated else None)
    if trainer is None:
        return None
    if joined.own is not None:
        raise ValueError("actor.colocated, --shares_devices_with: only actors of launch.local share devices")
    turn = EngineTurn(joined.work.path, HELPER if trainer == "helper" else LEARNER)
    report_phase("waiting for the devices")
    while not turn.try_take():
        on_wait()
        time.sleep(POLL_S)
    return turn


async def serve_until_signalled(actor: Actor, duties: Iterable[BackgroundTask], *, shutdown_grace_s: float) -> None:
    """Serves until a stop signal, or until the actor ends by itself; raises the error that ended it.

    After SIGTERM or SIGHUP the actor claims no more tickets and hands over its own within `shutdown_grace_s`. SIGINT,
    which a terminal also sends to the engine, or a second stop signal ends it immediately.
    """
    told, at_once = asyncio.Event(), asyncio.Event()

    def tell(number: int) -> None:
        if told.is_set():
            at_once.set()
        told.set()
        if number == signal.SIGINT:
            at_once.set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, tell, number)

    serving = asyncio.create_task(actor.run(duties))
    told_at_all, told_twice = asyncio.create_task(told.wait()), asyncio.create_task(at_once.wait())
    await asyncio.wait({serving, told_at_all}, return_when=asyncio.FIRST_COMPLETED)
    if not told.is_set():
        await asyncio.wait({told_at_all}, timeout=LATE_SIGNAL_S)
    if not serving.done() and shutdown_grace_s > 0:
        leaving = asyncio.create_task(shut_down(actor))
        await asyncio.wait(
            {serving, leaving, told_twice}, timeout=shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    serving.cancel()
    for waiting in (told_at_all, told_twice):
        waiting.cancel()
    await asyncio.wait({serving}, timeout=GIVE_BACK_S)
    if told.is_set():
        logging.info("actor stopped groups=%d", actor.serving.tally.num_emitted)
        if not serving.done():
            end_now("the store is unreachable; the tickets of this actor are released when their leases expire")
        return
    (outcome,) = await asyncio.gather(serving, return_exceptions=True)
    if isinstance(outcome, BaseException):
        raise first_cause(outcome)


def end_now(why: str) -> None:
    """Exits the process with 0 although threads still wait for the store; the engine's processes die with it."""
    print(f"actor exits immediately: {why}", file=sys.stderr, flush=True)
    os._exit(0)


def first_cause(error: BaseException) -> BaseException:
    """Returns the first error of a (nested) exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
