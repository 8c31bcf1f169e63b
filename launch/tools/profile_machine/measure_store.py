"""Store measurement: the `store` part of a profile (`launch/tools/plan/profile.py`).

Several client processes make the same call concurrently, to find the calls/s that the store answers. The clients run on
this machine. If the store does too, they compete for its cores, and their Python time counts. If the store is
elsewhere, this machine must be fast enough to saturate it.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import time
import uuid
from collections.abc import Generator
from typing import Any

import numpy as np

from bridge import codec
from bridge.rollout_types import Sampling, Task, Ticket, TicketKind, Version
from bridge.store.admin import open_runs
from bridge.store.open import SqlStore, create_run, open_store, sqlite_path
from bridge.store.postgres.connections import Connections
from configs.sections import StoreConfig
from launch.tools.out_file import write_out_file
from launch.tools.profile_machine.profile_worker import RpcProcess, wait_for
from launch.tools.profile_machine.store_client import make_group

_SIZES = ((2, 100), (8, 20_000))
"""Samples and tokens of the two measured groups: 3 KB and 2 MB."""
_NUM_GROUPS = (300, 60)
_WINDOW, _ACKNOWLEDGE_EVERY = 64, 8
_NUM_OTHERS = 200
"""Heartbeats that a read of all heartbeats returns."""
_MOST_LISTENERS = 40
_CALL_S = 3.0
_NUM_TOLD = 150
_DEADLINE_S = 120.0
_LEASE_S = 600.0


def measure_store(url: str, actor_role: str, logs: pathlib.Path) -> dict[str, Any]:
    """Measures a store in a new run, which is dropped afterwards; a SQLite file must be new.

    Raises ChildError if a client failed or hung, and ValueError if the store rejects the connection.
    """
    run = f"profile-{uuid.uuid4().hex[:12]}"
    with _a_run(url, run, actor_role) as store, contextlib.ExitStack() as stack:
        names = [f"profile-{i}" for i in range(max(2, os.cpu_count() or 2))]
        clients = _Clients({name: stack.enter_context(_client(url, run, name, logs)) for name in names})
        maker = _Tickets()
        group_s, byte_s = _groups(store, clients, maker)
        read_s = clients.seconds_a_call("leased")
        write_s = clients.seconds_a_call("heartbeat")
        claim_s = clients.seconds_a_call("claim")
        clients.ask_first("beat_for", num=_NUM_OTHERS)
        row_s = max(0.0, clients.seconds_a_call("heartbeats") - read_s) / _NUM_OTHERS
        most = 0 if sqlite_path(url) else _max_connections(url)
        return {
            "group_s": group_s,
            "byte_s": byte_s,
            "claim_call_s": claim_s,
            "write_s": write_s,
            "read_s": read_s,
            "row_s": row_s,
            "listener_s": _listener_s(store, clients, maker, num=min(_MOST_LISTENERS, most // 2)) if most else 0.0,
            "max_connections": most,
        }


@contextlib.contextmanager
def _a_run(url: str, run: str, actor_role: str) -> Generator[SqlStore]:
    create_run(url, run=run, name=run, actor_role=actor_role)
    try:
        with contextlib.closing(open_store(url, run=run)) as store:
            store.acquire_leadership("profile", lease_s=_LEASE_S)
            yield store
    finally:
        if not sqlite_path(url):
            with open_runs(url) as runs:
                runs.drop(run, force=True)


@contextlib.contextmanager
def _client(url: str, run: str, name: str, logs: pathlib.Path) -> Generator[RpcProcess]:
    child = RpcProcess("launch.tools.profile_machine.store_client", [url, run, name], logs / f"{name}.log")
    try:
        wait_for(child, deadline_s=_DEADLINE_S)
        yield child
    finally:
        child.close()


class _Clients:
    def __init__(self, children: dict[str, RpcProcess]) -> None:
        self.names, self._children = list(children), list(children.values())

    def send(self, do: str, **arguments: Any) -> None:
        for child in self._children:
            child.send({"do": do, **arguments})

    def answers(self) -> list[dict[str, Any]]:
        return [wait_for(c, *(o for o in self._children if o is not c), deadline_s=_DEADLINE_S) for c in self._children]

    def ask_first(self, do: str, **arguments: Any) -> dict[str, Any]:
        first, *others = self._children
        first.send({"do": do, **arguments})
        return wait_for(first, *others, deadline_s=_DEADLINE_S)

    def seconds_a_call(self, what: str) -> float:
        """Returns the store's seconds per call under concurrent calls of all clients."""
        self.send("calls", what=what, seconds=_CALL_S)
        return 1 / sum(a["num"] / a["seconds"] for a in self.answers())


class _Tickets:
    def __init__(self) -> None:
        self._next = 0

    def make(self, num: int, num_samples: int, *, kind: TicketKind = "train") -> list[Ticket]:
        numbers = range(self._next, self._next + num)
        self._next += num
        return [
            Ticket(
                id=f"t{number}",
                kind=kind,
                round=0,
                order=number,
                prompt_tokens=np.ones(16, np.int32),
                task=Task.judged_by("exact", answer="1"),
                num_samples=num_samples,
                num_requests=num_samples,
                sampling=Sampling(max_tokens=32_768),
                min_version=Version(incarnation=0, step=0),
            )
            for number in numbers
        ]


def _groups(store: SqlStore, clients: _Clients, tickets: _Tickets) -> tuple[float, float]:
    """Returns (seconds per group of size 0, seconds per byte), from a line through two group sizes."""
    points = []
    for (num_samples, num_tokens), num in zip(_SIZES, _NUM_GROUPS, strict=True):
        seconds = seconds_of_a_group(store, clients, tickets, num, num_samples, num_tokens)
        (ticket,) = tickets.make(1, num_samples)
        points.append((len(codec.encode(make_group(ticket, "a", num_tokens), max_bytes=codec.MAX_BYTES)), seconds))
    (small, small_s), (large, large_s) = points
    byte_s = max(0.0, (large_s - small_s) / (large - small))
    return max(small_s - byte_s * small, 0.0), byte_s


def seconds_of_a_group(
    store: SqlStore, clients: _Clients, tickets: _Tickets, num: int, num_samples: int, num_tokens: int
) -> float:
    """Issues tickets, and reads and acknowledges groups like a learner, while all clients submit groups.

    The first tenth is not timed.
    """
    warm_up = max(1, num // 10)
    total = warm_up + num
    begun_s, after_seq = 0.0, 0
    num_read = num_issued = 0
    unacknowledged: list[str] = []
    give_up_s = time.monotonic() + _DEADLINE_S
    while num_read < total:
        if time.monotonic() > give_up_s:
            raise ValueError(f"the store returned no group for {_DEADLINE_S:.0f} s, after {num_read} of {total}")
        mark = store.mark()
        if num_issued < min(total, num_read + _WINDOW // 2):
            batch = tickets.make(min(total, num_read + _WINDOW) - num_issued, num_samples)
            store.put_tickets(batch)
            if not num_issued:
                clients.send("serve", num_tokens=num_tokens)
            num_issued += len(batch)
        stored = store.read_groups(after_seq=after_seq, limit=_ACKNOWLEDGE_EVERY)
        for one in stored:
            after_seq = one.seq
            give_up_s = time.monotonic() + _DEADLINE_S
            num_read += 1
            unacknowledged.append(one.group.ticket_id)
            if num_read == warm_up:
                begun_s = time.perf_counter()
        if len(unacknowledged) >= _ACKNOWLEDGE_EVERY or num_read == total:
            store.acknowledge(unacknowledged)
            unacknowledged = []
        if not stored:
            store.wait(mark, ("groups",), timeout_s=1.0)
    spent_s = time.perf_counter() - begun_s
    ends = {name: tickets.make(1, num_samples, kind="probe") for name in clients.names}
    for name, ticket in ends.items():
        store.put_tickets(ticket, only_for=name)  # tells the client that no more tickets follow
    clients.answers()
    store.withdraw([t.id for ticket in ends.values() for t in ticket])
    return spent_s / num


def _listener_s(store: SqlStore, clients: _Clients, tickets: _Tickets, *, num: int) -> float:
    """Returns the seconds per additional listener of a change, from ticket issue with and without `num` listeners."""

    def told_s() -> float:
        offered = tickets.make(1 + _NUM_TOLD, 2)
        store.put_tickets(offered[:1])
        start = time.perf_counter()
        for ticket in offered[1:]:
            store.put_tickets([ticket])
        spent_s = time.perf_counter() - start
        store.withdraw([t.id for t in offered])
        return spent_s / _NUM_TOLD

    alone_s = told_s()
    clients.ask_first("listen", num=num)
    return max(0.0, told_s() - alone_s) / num


def _max_connections(url: str) -> int:
    connections = Connections(url)
    with contextlib.closing(connections.connect()) as connection:
        row = connection.execute("SHOW max_connections").fetchone()
    assert row is not None
    return int(row[0])


def store_profile(store: StoreConfig, folder: pathlib.Path) -> dict[str, Any]:
    """Measures a config's store, or a new SQLite file in `folder`, as `measure_store` does."""
    url = store.url if is_server(store) else f"sqlite:///{folder}/store.db"  # never the run's own file
    return measure_store(url, store.actor_role, folder)


def is_server(store: StoreConfig) -> bool:
    """Returns True if the store is a database server, which actors of many machines may share."""
    return bool(store.url) and not sqlite_path(store.url)


def put_store(store: StoreConfig, out: pathlib.Path) -> dict[str, Any]:
    """Measures a config's store and replaces the `store` part of a profile file; returns that part.

    Raises ValueError if the file exists and is no profile.
    """
    try:
        profile = json.loads(out.read_text()) if out.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"--out={out} exists and is not a profile: {e}") from e
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as folder:
        part = store_profile(store, pathlib.Path(folder))
    write_out_file(out, json.dumps({**profile, "store": part}, indent=2) + "\n")
    return part
