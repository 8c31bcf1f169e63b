"""Each operation of the store's protocol that writes, with what goes before it; and all that a store holds, to compare.

Between two stores in which the same was done only names of calls, row numbers and times may differ.
"""

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable
from typing import Any, Literal

import blake3
import numpy as np
import psycopg
from psycopg import sql

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Ticket, Version
from bridge.weight_types import Announcement, RunCard, WeightManifest
from tests.bridge.factories import make_group, make_progress, make_rollout, make_ticket

Stores = dict[str, Any]
"""`learner` and `actor`: the same run as each side has it open."""
VOLATILE = {"run", "call", "claim", "offered_by", "given_up_by", "done_by", "lead_by", "number", "owner", "created_s"}
TIMES = {"lease_expires_s", "lead_expires_s", "time_s", "finished_s", "counted_s"}
"""Only whether there is one is compared."""


def ticket(order: int, **fields: Any) -> Ticket:
    return make_ticket(f"t{order}", order=order, prompt_tokens=np.array([order, 1], np.int32), **fields)


def group(order: int, *, num_tokens: int = 20, actor: str = "a") -> Any:
    return make_group(ticket(order), actor=actor, rollouts=(make_rollout(num_tokens),) * 2)


def offer(stores: Stores) -> None:
    stores["learner"].put_tickets([ticket(i) for i in range(4)])


def claim(stores: Stores) -> None:
    offer(stores)
    stores["actor"].claim("a", limit=2, lease_s=60)


def serve(stores: Stores) -> None:
    claim(stores)
    for order in (0, 1):
        stores["actor"].put_group(group(order))


def pinned(stores: Stores) -> None:
    serve(stores)
    stores["learner"].put_tickets([ticket(-1, kind="eval"), ticket(-2, kind="probe")])


def acknowledged(stores: Stores) -> None:
    serve(stores)
    stores["learner"].acknowledge(["t0"])


def anchored(stores: Stores) -> None:
    stores["actor"].raise_anchors({"known": [1.0]})


def fenced(stores: Stores) -> None:
    serve(stores)
    stores["learner"].fence("a", "a reason")


def nothing(stores: Stores) -> None:
    del stores


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call, what goes before it, and what it returns, as something to compare."""

    name: str
    side: Literal["learner", "actor"]
    before: Callable[[Stores], None]
    call: Callable[[Any], Any]
    want: Any


def _ids(tickets: list[Ticket]) -> list[str]:
    return [t.id for t in tickets]


BLOB = b"a file of the model's folder"
BEAT = Heartbeat(process="a", role="actor", pid=1, time_s=1.0)
CARD = RunCard(run="r", name="n", config="{}", files=(), tensors=(), sluice="0", vllm="")
ANNOUNCEMENT = Announcement(
    manifest=WeightManifest(
        run="r",
        version=Version(incarnation=0, step=1),
        tensors=(),
        shards=(),
        tokenizer_hash="",
    ),
    sources=("https://learner.example",),
)
OPERATIONS = (
    Operation("put_tickets", "learner", nothing, lambda s: s.put_tickets([ticket(0), ticket(1)]), 2),
    Operation("put_tickets_again", "learner", offer, lambda s: s.put_tickets([ticket(3), ticket(4)]), 1),
    Operation("claim", "actor", offer, lambda s: _ids(s.claim("a", limit=2, lease_s=60)), ["t0", "t1"]),
    Operation(
        "claim_frontier",
        "actor",
        claim,
        lambda s: _ids(s.claim("b", limit=2, lease_s=60, width=3, among=2, served=["t0"])),
        ["t2"],
    ),
    Operation("renew", "actor", claim, lambda s: s.renew("a", ["t0", "t3", "t1"], lease_s=90), ["t0", "t1"]),
    Operation("hand_over", "actor", claim, lambda s: s.hand_over("a", make_progress("t0")), None),
    Operation("release", "actor", claim, lambda s: s.release("a", ["t0"]), None),
    Operation("put_group", "actor", claim, lambda s: s.put_group(group(0)), True),
    Operation("put_large_group", "actor", claim, lambda s: s.put_group(group(0, num_tokens=40_000)), True),
    Operation("put_group_again", "actor", serve, lambda s: s.put_group(group(0)), False),
    Operation("fail_ticket", "actor", claim, lambda s: s.fail_ticket("t0", "why", max_attempts=2), None),
    Operation("fail_ticket_last", "actor", claim, lambda s: s.fail_ticket("t0", "why", max_attempts=1), None),
    Operation("acknowledge", "learner", serve, lambda s: s.acknowledge(["t0", "t1"]), None),
    Operation("reissue", "learner", acknowledged, lambda s: s.reissue(["t0", "t1", "t9"]), 2),
    Operation("withdraw", "learner", serve, lambda s: s.withdraw(["t0", "t2"]), None),
    Operation("withdraw_pinned", "learner", pinned, lambda s: s.withdraw_pinned(), None),
    Operation("roll_back", "learner", acknowledged, lambda s: s.roll_back(["t0", "t1"], next_order=2, step=0), 1),
    Operation("fence", "learner", serve, lambda s: s.fence("a", "a reason"), None),
    Operation("unfence", "learner", fenced, lambda s: s.unfence("a"), None),
    Operation("acquire_leadership", "learner", nothing, lambda s: s.acquire_leadership("here", lease_s=60), 1),
    Operation("renew_leadership", "learner", nothing, lambda s: s.renew_leadership(lease_s=90), None),
    Operation("release_leadership", "learner", nothing, lambda s: s.release_leadership(), None),
    Operation("finish", "learner", nothing, lambda s: s.finish(7), None),
    Operation("announce", "learner", nothing, lambda s: s.announce(ANNOUNCEMENT), None),
    Operation(
        "put_run_card",
        "learner",
        nothing,
        lambda s: s.put_run_card(CARD, {blake3.blake3(BLOB).hexdigest(): BLOB}),
        None,
    ),
    Operation("record_restore", "learner", nothing, lambda s: s.record_restore(0, 7), None),
    Operation("raise_anchors", "actor", anchored, lambda s: s.raise_anchors({"known": [0.5, 2], "new": [1]}), None),
    Operation("put_anchors", "learner", anchored, lambda s: s.put_anchors({"known": [0.5, 2], "new": [1]}), None),
    Operation("heartbeat", "actor", nothing, lambda s: s.heartbeat(BEAT), None),
    Operation("engine_capacity", "actor", nothing, lambda s: s.engine_capacity(anew=True), {}),
    Operation("register_actor", "actor", nothing, lambda s: s.register_actor(BEAT, location="here"), None),
)


def dump_postgres(admin: psycopg.Connection, run: str) -> dict[str, list[str]]:
    """All rows of a run, by table."""
    tables = [t for (t,) in admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'sluice'").fetchall()]
    found: dict[str, list[str]] = {}
    for table in tables:
        name = sql.Identifier("sluice", table)
        with admin.cursor() as cursor:
            cursor.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(name))
            columns = [c.name for c in cursor.description or ()]
            if "run" in columns:
                cursor.execute(sql.SQL("SELECT * FROM {} WHERE run = %s").format(name), (run,))
                found[table] = sorted(_plain(columns, row) for row in cursor.fetchall())
    return found


def dump_sqlite(path: str) -> dict[str, list[str]]:
    """All rows of a file, by table; without the reading of the clock that any of its writers keeps."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = [t for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found: dict[str, list[str]] = {}
        for table in tables:
            kept = " WHERE key NOT LIKE 'clock_%'" if table == "meta" else ""
            cursor = db.execute(f"SELECT * FROM {table}{kept}")
            columns = [c[0] for c in cursor.description]
            found[table] = sorted(_plain(columns, row) for row in cursor.fetchall())
        return found


def _plain(columns: list[str], row: tuple[Any, ...]) -> str:
    kept = dict(zip(columns, row, strict=True))
    return repr({k: (v is None if k in TIMES else v) for k, v in kept.items() if k not in VOLATILE})
