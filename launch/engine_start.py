"""While an actor's engine starts: signs of life, a deadline, and what is said of limits it does not start with."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from absl import logging

from actor.duties.signs import heartbeat
from actor.engine.limits import LimitsFile
from actor.limits import Limits
from bridge.pulse import Doing, Pulse
from bridge.store.protocol import SharedStore
from launch import command_line


@contextlib.contextmanager
def deadline(seconds: float, limits_file: LimitsFile, pulse: Pulse) -> Iterator[None]:
    """Ends the process if its block takes longer: what hangs in there can't be interrupted.

    Who feels the pulse counts from where we do, so that its bound, which is longer, never ends us first.
    """

    def end() -> None:
        reason = f"the engine did not start within {seconds:.0f} s (actor.start_timeout_s)"
        if limits_file.refuse():
            say_refused(limits_file, reason)
            os._exit(command_line.RESIZE)
        print(f"error: {reason}", file=sys.stderr)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    pulse.work(Doing.STARTING)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    pulse.work(Doing.STARTING)


@contextlib.contextmanager
def heartbeats(store: SharedStore, name: str) -> Iterator[None]:
    """Heartbeats of an actor that does not serve yet, while its block runs."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.is_set():
            try:
                store.heartbeat(heartbeat(name, None, None))
            except Exception as e:  # whoever serves with this store hears of it, too
                logging.error("no heartbeat while the engine starts: %s", e)
                return
            has_ended.wait(Limits.heartbeat_s)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def say_refused(file: LimitsFile, reason: str) -> None:
    """Says that the limits asked for were put aside, and why."""
    print(
        f"error: the engine did not start with the limits of {file.path}: {reason}; the file is "
        f"{file.refused_path.name} now and the config's limits are used",
        file=sys.stderr,
        flush=True,
    )
