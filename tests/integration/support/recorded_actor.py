"""An actor without an engine: answers each ticket with a group that its id alone decides, whoever asks and when."""

import contextlib
import threading
import time
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Rollout, Ticket
from bridge.store.open import SqliteStore
from tests.bridge.factories import make_group, make_rollout

NAME = "recorded"
_LOOK_S = 0.02
_BEAT_S = 1.0


def recorded_group(ticket: Ticket) -> Group:
    """The ticket's group: responses of any length, as likely as tokens of a random model are, half of them right."""
    rng = np.random.default_rng(zlib.crc32(ticket.id.encode()))

    def rollout(i: int) -> Rollout:
        size = int(rng.integers(1, ticket.sampling.max_tokens + 1))
        tokens = rng.integers(0, 90, size).astype(np.int32)
        logprobs = rng.uniform(-6, -4, size).astype(np.float32)
        step = ticket.min_version.step
        return make_rollout(size, step=step, tokens=tokens, behavior_logprobs=logprobs, reward=float(i % 2))

    return make_group(
        ticket,
        rollouts=tuple(rollout(i) for i in range(ticket.num_samples)),
        incarnation=ticket.min_version.incarnation,
        actor=NAME,
        started_s=time.time(),
        finished_s=time.time(),
    )


@contextlib.contextmanager
def recorded_actor(store: Path) -> Generator[None]:
    """Answers from the moment there is a store until the end."""
    stop = threading.Event()
    thread = threading.Thread(target=_serve, args=(store, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _serve(path: Path, stop: threading.Event) -> None:
    while not path.is_file():
        if stop.wait(_LOOK_S):
            return
    beat_s = 0.0
    with contextlib.closing(SqliteStore(path)) as store:
        while not stop.wait(_LOOK_S):
            if time.monotonic() - beat_s > _BEAT_S:
                beat_s = time.monotonic()
                store.heartbeat(Heartbeat(process=NAME, role="actor", pid=0, time_s=time.time()))
            for ticket in store.claim(NAME, limit=64, lease_s=60.0):
                store.put_group(recorded_group(ticket))
