"""The store on one machine: a SQLite file that any number of processes open.

A claimed ticket is leased, and the lease is only a promise not to offer it to others for a while:
whoever hands in the first complete group wins, lease or no lease.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from typing_extensions import override

from bridge import codec
from bridge.store import frontier
from bridge.store.protocol import FencedError, GroupStore, StoredGroup, UnfitGroupError
from bridge.store.sqlite_database import SqliteDatabase
from bridge.types import Group, Heartbeat, Ticket

_STATES = ("open", "claimed", "done", "acknowledged", "failed")


class SqliteStore(GroupStore):
    """One file, for any number of processes; safe to use from several threads, closed before a fork."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.time,
        max_message_bytes: int = codec.MAX_BYTES,
    ) -> None:
        """Opens the file, or makes it and its folder; `clock` gives Unix seconds.

        Any call raises `sqlite_database.StoreBusyError` when another process keeps the file locked
        for longer than `busy_timeout_s`.

        Raises:
          ValueError: the file is no Sluice store, or has another schema version.
        """
        self._database = SqliteDatabase(path, busy_timeout_s=busy_timeout_s)
        self._clock = clock
        self._max_bytes = max_message_bytes

    @override
    def put_tickets(self, tickets: Iterable[Ticket]) -> int:
        rows = [(t.id, t.order, t.kind, codec.encode(t, max_bytes=self._max_bytes)) for t in tickets]
        insert = """INSERT INTO tickets (id, "order", kind, payload, state) VALUES (?, ?, ?, ?, 'open')
            ON CONFLICT (id) DO NOTHING"""
        with self._database.write() as db:
            return db.executemany(insert, rows).rowcount if rows else 0

    @override
    def claim(
        self,
        actor: str,
        *,
        limit: int,
        lease_s: float,
        width: int | None = None,
        among: int = 1,
        served: Sequence[str] = (),
    ) -> list[Ticket]:
        _check_limit(limit)
        _check_lease(lease_s)
        now = self._clock()
        with self._database.write() as db:
            self._refuse_fenced(db, actor)
            db.executemany(
                "UPDATE tickets SET served = 1 WHERE id = ? AND state = 'claimed' AND actor = ?",
                [(i, actor) for i in served],
            )
            offers = db.execute(
                """SELECT id, "order", kind = 'train' FROM tickets
                WHERE state = 'open' OR (state = 'claimed' AND lease_expires_s <= ?)
                ORDER BY "order", rowid LIMIT ?""",
                (now, limit if width is None else -1),
            ).fetchall()
            in_service: list[int] = []
            if width is not None:
                running = """SELECT DISTINCT "order" FROM tickets
                    WHERE state = 'claimed' AND lease_expires_s > ? AND served = 0 AND kind = 'train'"""
                in_service = [order for (order,) in db.execute(running, (now,))]
            ids = frontier.choose(
                (frontier.Offer(id_, order, bool(is_train)) for id_, order, is_train in offers),
                limit=limit,
                max_train=_share(db, actor, among=among, width=width),
                width=width,
                in_service=in_service,
            )
            db.executemany(
                "UPDATE tickets SET state = 'claimed', served = 0, actor = ?, lease_expires_s = ? WHERE id = ?",
                [(actor, now + lease_s, id_) for id_ in ids],
            )
            payloads = [db.execute("SELECT payload FROM tickets WHERE id = ?", (i,)).fetchone()[0] for i in ids]
        return [codec.decode(Ticket, payload, max_bytes=self._max_bytes) for payload in payloads]

    @override
    def leased(self, actor: str) -> set[str]:
        with self._database.read() as db:
            rows = db.execute("SELECT id FROM tickets WHERE state = 'claimed' AND actor = ?", (actor,))
            return {id_ for (id_,) in rows}

    @override
    def renew(self, actor: str, ticket_ids: Sequence[str], *, lease_s: float) -> list[str]:
        _check_lease(lease_s)
        update = """UPDATE tickets SET lease_expires_s = ?
            WHERE id = ? AND state = 'claimed' AND actor = ?"""
        expires = self._clock() + lease_s
        with self._database.write() as db:
            return [i for i in ticket_ids if db.execute(update, (expires, i, actor)).rowcount]

    @override
    def release(self, actor: str, ticket_ids: Sequence[str]) -> None:
        with self._database.write() as db:
            db.executemany(
                """UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL
                WHERE id = ? AND state = 'claimed' AND actor = ?""",
                [(i, actor) for i in ticket_ids],
            )

    @override
    def put_group(self, group: Group) -> bool:
        payload = codec.encode(group, max_bytes=self._max_bytes)
        with self._database.write() as db:
            self._refuse_fenced(db, group.actor)
            row = db.execute("SELECT state, payload FROM tickets WHERE id = ?", (group.ticket_id,)).fetchone()
            if row is None:
                raise KeyError(f"the store knows no ticket {group.ticket_id!r}")
            _check_fit(codec.decode(Ticket, row[1], max_bytes=self._max_bytes), group)
            if row[0] in ("done", "acknowledged"):
                return False
            db.execute(
                "INSERT INTO groups (ticket_id, kind, payload) VALUES (?, ?, ?)",
                (group.ticket_id, group.kind, payload),
            )
            db.execute(
                "UPDATE tickets SET state = 'done', actor = ?, lease_expires_s = NULL WHERE id = ?",
                (group.actor, group.ticket_id),
            )
        return True

    @override
    def read_groups(self, *, after_seq: int, limit: int, kind: str = "train") -> list[StoredGroup]:
        # Nothing is missed: seq is given out inside the one write transaction there is at a time, so no group can
        # appear below one already visible.
        _check_limit(limit)
        with self._database.read() as db:
            rows = db.execute(
                "SELECT seq, payload FROM groups WHERE kind = ? AND seq > ? ORDER BY seq LIMIT ?",
                (kind, after_seq, limit),
            ).fetchall()
        return [StoredGroup(seq, codec.decode(Group, payload, max_bytes=self._max_bytes)) for seq, payload in rows]

    @override
    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        ids = [(i,) for i in ticket_ids]
        with self._database.write() as db:
            db.executemany("DELETE FROM groups WHERE ticket_id = ?", ids)
            # The ticket itself is small and stays: a learner that falls back to an older checkpoint
            # can have it served again.
            db.executemany(
                """UPDATE tickets SET state = 'acknowledged', actor = NULL, lease_expires_s = NULL
                WHERE id = ?""",
                ids,
            )

    @override
    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> int:
        del older_than  # a group is one ticket here
        ids = [(i,) for i in dict.fromkeys(ticket_ids)]
        if not ids:
            return 0
        with self._database.write() as db:
            db.executemany("DELETE FROM groups WHERE ticket_id = ?", ids)
            num_reissued = db.executemany(
                "UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL WHERE id = ?", ids
            ).rowcount
            db.execute("UPDATE meta SET value = value + ? WHERE key = 'reissued'", (num_reissued,))
        return num_reissued

    @override
    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        ids = [(i,) for i in ticket_ids]
        with self._database.write() as db:
            db.executemany("DELETE FROM groups WHERE ticket_id = ?", ids)
            db.executemany("DELETE FROM tickets WHERE id = ?", ids)

    @override
    def withdraw_pinned(self) -> None:
        with self._database.write() as db:
            db.execute("DELETE FROM groups WHERE kind <> 'train'")
            db.execute("DELETE FROM tickets WHERE kind <> 'train'")

    @override
    def rewind(self, open_ids: Sequence[str], *, next_order: int, step: int) -> int:
        offer = """UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL
            WHERE state = 'acknowledged' AND kind = 'train' AND id = ?"""
        later = """SELECT tickets.id, groups.payload FROM tickets LEFT JOIN groups ON ticket_id = tickets.id
            WHERE tickets.kind = 'train' AND "order" >= ?"""
        with self._database.write() as db:
            forgotten = [
                (id_,)
                for id_, payload in db.execute(later, (next_order,)).fetchall()
                if payload is None or codec.decode(Group, payload, max_bytes=self._max_bytes).max_step > step
            ]
            db.executemany("DELETE FROM groups WHERE ticket_id = ?", forgotten)
            db.executemany("DELETE FROM tickets WHERE id = ?", forgotten)
            return db.executemany(offer, [(i,) for i in open_ids]).rowcount if open_ids else 0

    @override
    def heartbeat(self, beat: Heartbeat) -> None:
        payload = codec.encode(beat, max_bytes=self._max_bytes)
        with self._database.write() as db:
            db.execute("INSERT OR REPLACE INTO heartbeats VALUES (?, ?)", (beat.process, payload))

    @override
    def heartbeats(self) -> list[Heartbeat]:
        with self._database.read() as db:
            rows = db.execute("SELECT payload FROM heartbeats ORDER BY process").fetchall()
        beats: list[Heartbeat] = []
        for (payload,) in rows:
            # A process of an older build may live on after the file was migrated under it, and beats as it did.
            with contextlib.suppress(codec.OtherFormatError):
                beats.append(codec.decode(Heartbeat, payload, max_bytes=self._max_bytes))
        return beats

    @override
    def fence(self, actor: str, reason: str) -> None:
        with self._database.write() as db:
            db.execute("INSERT OR REPLACE INTO fences VALUES (?, ?)", (actor, reason))
            db.execute(
                """DELETE FROM groups WHERE ticket_id IN
                (SELECT id FROM tickets WHERE state = 'done' AND actor = ?)""",
                (actor,),
            )
            db.execute(
                """UPDATE tickets SET state = 'open', actor = NULL, lease_expires_s = NULL
                WHERE state IN ('claimed', 'done') AND actor = ?""",
                (actor,),
            )

    @override
    def fenced(self, actor: str) -> str | None:
        with self._database.read() as db:
            row = db.execute("SELECT reason FROM fences WHERE actor = ?", (actor,)).fetchone()
        return None if row is None else row[0]

    @override
    def fenced_actors(self) -> set[str]:
        with self._database.read() as db:
            return {name for (name,) in db.execute("SELECT actor FROM fences")}

    @override
    def give_up(self, ticket_id: str, reason: str, *, max_attempts: int) -> None:
        with self._database.write() as db:
            num_given_up = db.execute(
                """UPDATE tickets SET attempts = attempts + 1, failure = ?, actor = NULL, lease_expires_s = NULL,
                state = CASE WHEN attempts + 1 >= ? THEN 'failed' ELSE 'open' END
                WHERE id = ? AND state = 'claimed'""",
                (reason, max_attempts, ticket_id),
            ).rowcount
            offered = db.execute("SELECT count(*) FROM tickets WHERE id = ? AND state = 'open'", (ticket_id,))
            num_offered = min(num_given_up, offered.fetchone()[0])
            db.execute("UPDATE meta SET value = value + ? WHERE key = 'reissued'", (num_offered,))

    @override
    def failed(self) -> dict[str, str]:
        # A process of an older build may live on after the file was migrated; it keeps the reason as the actor.
        select = "SELECT id, coalesce(failure, actor, '') FROM tickets WHERE state = 'failed'"
        with self._database.read() as db:
            return dict(db.execute(select).fetchall())

    @override
    def num_unclaimed(self) -> int:
        with self._database.read() as db:
            row = db.execute("SELECT count(*) FROM tickets WHERE state = 'open' AND kind = 'train'").fetchone()
        return row[0]

    @override
    def counts(self) -> dict[str, int]:
        with self._database.read() as db:
            rows = db.execute(
                """SELECT state, count(*) FROM tickets GROUP BY state
                UNION ALL SELECT key, value FROM meta WHERE key = 'reissued'"""
            ).fetchall()
        return dict.fromkeys(_STATES, 0) | dict(rows)

    @override
    def next_incarnation(self) -> int:
        with self._database.write() as db:
            (value,) = db.execute("SELECT value FROM meta WHERE key = 'incarnations'").fetchone()
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'incarnations'")
        return value

    @override
    def record_restore(self, incarnation: int, step: int) -> None:
        with self._database.write() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"restored/{incarnation}", step))

    @override
    def restores(self) -> dict[int, int]:
        with self._database.read() as db:
            rows = db.execute("SELECT key, value FROM meta WHERE key LIKE 'restored/%'").fetchall()
        return {int(key.removeprefix("restored/")): step for key, step in rows}

    @override
    def close(self) -> None:
        self._database.close()

    def _refuse_fenced(self, db: sqlite3.Connection, actor: str) -> None:
        row = db.execute("SELECT reason FROM fences WHERE actor = ?", (actor,)).fetchone()
        if row is not None:
            raise FencedError(f"actor {actor} is fenced: {row[0]}")


def _share(db: sqlite3.Connection, actor: str, *, among: int, width: int | None) -> int | None:
    """How many training tickets an actor may take: its part of what is to be served now; None without a bound."""
    if among < 2:
        return None
    unserved = "kind = 'train' AND (state = 'open' OR (state = 'claimed' AND served = 0))"
    last_of_frontier = f"""SELECT max("order") FROM
        (SELECT DISTINCT "order" FROM tickets WHERE {unserved} ORDER BY "order" LIMIT ?)"""
    total, mine = db.execute(
        f"""SELECT count(*), coalesce(sum(state = 'claimed' AND actor = ?), 0) FROM tickets
        WHERE {unserved} AND "order" <= ({last_of_frontier})""",
        (actor, -1 if width is None else width),
    ).fetchone()
    return frontier.fair_share(total, mine=mine, among=among)


def _check_limit(limit: int) -> None:
    if limit < 0:  # SQLite would take it for "no limit"
        raise ValueError(f"limit must be >= 0, got {limit}")


def _check_lease(lease_s: float) -> None:
    if not lease_s > 0:
        raise ValueError(f"lease_s must be > 0, got {lease_s}")


def _check_fit(ticket: Ticket, group: Group) -> None:
    want = (ticket.kind, ticket.round, ticket.order, ticket.num_samples)
    got = (group.kind, group.round, group.order, len(group.rollouts))
    if got != want:
        raise UnfitGroupError(
            f"group {ticket.id} does not fit its ticket: (kind, round, order, rollouts) is {got}, wanted {want}"
        )
    if not np.array_equal(ticket.prompt_tokens, group.prompt_tokens):
        raise UnfitGroupError(
            f"group {ticket.id} does not fit its ticket: its prompt differs "
            f"({group.prompt_tokens.size} tokens, wanted {ticket.prompt_tokens.size})"
        )
