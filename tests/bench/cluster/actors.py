"""Actors without engines, each process many of them: some hand groups in, others have full engines and only look.

    python -m tests.bench.cluster.actors produce URL RUN NAME NUM_SAMPLES NUM_TOKENS CLAIM_AT_ONCE
    python -m tests.bench.cluster.actors look URL RUN NAME NUM_ACTORS

Those that look do what an actor's duties do, as often as the duties' own constants say.
"""

import contextlib
import sys
import threading
import time

from actor.background import CHANGES_GAP_S, LEASED_S, LOOK_S
from actor.loop import ActorLimits
from actor.weight_updates import ANNOUNCED_S
from bridge.heartbeat_types import Heartbeat
from bridge.store.open import SqlStore, open_store
from tests.bridge.factories import make_group, make_report, make_rollout

LEASE_S = 30.0


def produce(url: str, run: str, name: str, num_samples: int, num_tokens: int, limit: int) -> None:
    """Serves tickets, `limit` at a time, until it is killed."""
    rollouts = (make_rollout(num_tokens),) * num_samples
    with contextlib.closing(open_store(url, run=run)) as store:
        while True:
            mark = store.mark()
            for ticket in (tickets := store.claim(name, limit=limit, lease_s=600)):
                store.put_group(make_group(ticket, actor=name, rollouts=rollouts))
            if not tickets:
                store.wait(mark, ("tickets",), timeout_s=1.0)


def look(url: str, run: str, name: str, num_actors: int) -> None:
    """So many actors, until it is killed."""
    for i in range(num_actors):
        threading.Thread(target=_serve_full, args=(url, run, f"{name}-{i}"), daemon=True).start()
        time.sleep(ActorLimits(lease_s=LEASE_S).heartbeat_s / num_actors)  # not all at the same moment
    threading.Event().wait()


def _serve_full(url: str, run: str, name: str) -> None:
    with contextlib.closing(open_store(url, run=run)) as store:
        due = dict.fromkeys(_EVERY_S, time.monotonic())
        while True:
            mark = store.mark()
            for what, at_s in due.items():
                if at_s <= time.monotonic():
                    _do(store, name, what)
                    due[what] = time.monotonic() + _EVERY_S[what]
            store.wait(mark, ("tickets", "weights"), timeout_s=max(0.0, min(due.values()) - time.monotonic()))
            now = store.mark()
            if now["tickets"] != mark["tickets"]:
                due["leased"] = 0.0
            if now["weights"] != mark["weights"]:
                due["announced"] = 0.0
            time.sleep(CHANGES_GAP_S)


_EVERY_S = {
    "leased": LEASED_S,
    "announced": ANNOUNCED_S,
    "finished": LOOK_S,
    "beat": ActorLimits(lease_s=LEASE_S).heartbeat_s,
    "renew": LEASE_S / 3,
}


def _do(store: SqlStore, name: str, what: str) -> None:
    if what == "leased":
        store.leased(name)
    elif what == "announced":
        store.announced()
    elif what == "finished":
        store.finished()
    elif what == "renew":
        store.renew(name, ["none"], lease_s=LEASE_S)
    else:
        store.heartbeat(Heartbeat(process=name, role="actor", pid=1, time_s=time.time(), report=make_report()))
        store.engine_capacity()


if __name__ == "__main__":
    kind, url, run, name, *numbers = sys.argv[1:]
    (produce if kind == "produce" else look)(url, run, name, *map(int, numbers))
