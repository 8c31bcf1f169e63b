"""Run administration: lists and drops runs, and puts fenced actors on probation.

Requires a learner's role; the tables reject an actor's role. A process that leads a run uses `open.open_store` instead.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

from bridge import codec
from bridge.store.group_blobs import GroupBlobs
from bridge.store.open import sqlite_path
from bridge.store.postgres import tables_and_roles
from bridge.store.postgres.postgres_database import PostgresDatabase
from bridge.store.sql.base import new_request_id
from bridge.store.sql.database import Database, Row, Statement, Transaction
from bridge.store.sql.learner_side import DROPPER
from bridge.store.sql.ticket_rows import NUM_TICKETS
from bridge.store.sqlite_database import SqliteDatabase
from bridge.store.store_types import PERMANENT

ALIVE_S = 10.0
"""Largest age of the last heartbeat, in seconds, at which a process counts as live."""
ON_PROBATION = "on probation: "
"""Prefix of a fence reason whose actor may be probed again."""
_DROP_S = 100 * 365 * 86400.0
"""Leader lease of a run that is being dropped, in seconds. Effectively permanent, because no learner could use the
rest."""
_RETRY_S = 60.0
"""Seconds for which failed deletions in a bucket are retried."""
# Table, key column, rows deleted per transaction. Large tables go in parts, so that no transaction takes long.
_IN_PARTS = (("groups", "seq", 256), ("payloads", "call", 256), ("tickets", "number", 4096), ("anchors", "key", 4096))
_REST = (
    *("groups", "payloads", "tickets", "progress", "dropped_objects", "restores", "heartbeats", "fences"),
    *("announcements", "serving", "cards", "blobs", "anchors", "runs"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of one run at one moment of the store's clock."""

    run: str
    name: str
    """Human-readable name; empty for a store of one run."""
    leader: str
    """Location of the learner that leads the run; empty if there is none."""
    finished_step: int | None
    """Step of the last weights of a finished run, otherwise None."""
    step: int | None
    """Step of the newest announced weights; None before the first."""
    num_trained: int
    """Acknowledged training tickets: groups, or samples if samples are separate tickets."""
    num_waiting: int
    """Stored groups that are not trained, or not yet in a checkpoint."""
    num_bytes: int
    """Bytes of tickets, groups, files and anchors in the database."""
    num_objects: int
    """Groups stored in a bucket."""
    silent_s: float | None
    """Seconds since the last heartbeat of any of the run's processes; None if there was none."""
    live_actors: tuple[str, ...]
    """Names of actors with a recent heartbeat."""


class Runs:
    """Runs that this role may lead."""

    def __init__(self, database: Database, *, place: str, names: Callable[[], Sequence[Row]] | None) -> None:
        """Wraps an open database. `names` returns (run, name) of every run; None for a database of one run."""
        self._database, self._place, self._names = database, place, names

    def all(self) -> list[RunState]:
        """Returns every run, newest first if the store knows the age."""
        runs = {r[0]: r[1:] for r in self._read(_RUNS)}
        names = dict.fromkeys(runs, "") if self._names is None else dict(self._names())
        steps = dict(self._read("SELECT run, step FROM announcements"))
        trained = dict(self._read(_TRAINED))
        waiting = dict(self._read("SELECT run, count(*) FROM groups GROUP BY run"))
        sizes = {run: (int(num_bytes), num_objects) for run, num_bytes, num_objects in self._read(_SIZES)}
        beats = self._read("SELECT run, process, {now} - time_s FROM heartbeats ORDER BY process")
        found: list[RunState] = []
        for run, name in names.items():
            if run not in runs:
                continue  # the run was created after the first query
            leader, finished_step = runs[run]
            silences = [(process, silent_s) for r, process, silent_s in beats if r == run]
            num_bytes, num_objects = sizes.get(run, (0, 0))
            found.append(
                RunState(
                    run=run,
                    name=name,
                    leader=leader or "",
                    finished_step=finished_step,
                    step=steps.get(run),
                    num_trained=int(trained.get(run, 0)),
                    num_waiting=waiting.get(run, 0),
                    num_bytes=num_bytes,
                    num_objects=num_objects,
                    silent_s=min((s for _, s in silences), default=None),
                    live_actors=tuple(p for p, s in silences if s < ALIVE_S and p != "learner"),
                )
            )
        return found

    def find(self, name_or_id: str) -> RunState:
        """Returns the run with that name or id. Raises ValueError if no run or several runs match."""
        found = [r for r in self.all() if name_or_id in (r.run, r.name)]
        found = [r for r in found if r.run == name_or_id] or found
        if not found:
            raise ValueError(f"{self._place} has no run {name_or_id!r} of this role")
        if len(found) > 1:
            ids = ", ".join(f"{r.run} ({'finished' if r.finished_step is not None else 'not finished'})" for r in found)
            raise ValueError(f"{len(found)} runs have the name {name_or_id!r}; use an id: {ids}")
        return found[0]

    def drop(self, run: str, *, force: bool = False, bucket: str = "") -> RunState:
        """Deletes a run (name or id) with all its rows; returns its last state. A repeated call resumes the drop.

        With `force`, a live learner is superseded and exits. Live actors see that the run is finished and exit. The
        run's large groups in `bucket` are deleted; empty: they stay. Raises ValueError if the run does not exist, has
        live processes, or is the only run that the store can hold.
        """
        if self._names is None:
            raise ValueError(
                f"{self._place} is the store of a single run: stop its processes and remove the run's folder"
            )
        state = self.find(run)
        if state.live_actors and not force:
            raise ValueError(f"run {state.run} is served by {', '.join(state.live_actors)}: stop them, or set --force")
        self._take_away(state.run, force=force)
        for table, key, at_once in _IN_PARTS:
            part = f"SELECT {key} FROM {table} WHERE run = :run LIMIT :at_once"
            delete = f"DELETE FROM {table} WHERE run = :run AND {key} IN ({part}) RETURNING 1"
            while self._write(state.run, _step(delete, state.run, at_once=at_once))[0]:
                pass
        if bucket:
            objects = GroupBlobs(bucket, run=state.run, max_bytes=codec.MAX_BYTES, retry_s=_RETRY_S)
            with contextlib.closing(objects):
                objects.delete_all()
        self._write(state.run, *(_step(f"DELETE FROM {t} WHERE run = :run", state.run) for t in _REST), locks=True)
        return state

    def put_on_probation(self, run: str, actor: str) -> None:
        """Lets a permanently fenced actor be probed again. The actor's next process is re-admitted if its probe passes.

        Raises ValueError if the run does not exist, or the actor is not fenced.
        """
        id_ = self.find(run).run
        reasons = dict(self._read("SELECT actor, reason FROM fences WHERE run = :run ORDER BY actor", run=id_))
        if actor not in reasons:
            fenced = f"fenced actors: {', '.join(reasons)}" if reasons else "no actor is fenced"
            raise ValueError(f"actor {actor!r} of run {id_} is not fenced; {fenced}")
        reason = ON_PROBATION + reasons[actor].removeprefix(ON_PROBATION).removeprefix(PERMANENT)
        change = "UPDATE fences SET reason = :reason WHERE run = :run AND actor = :actor"
        self._write(id_, _step(change, id_, actor=actor, reason=reason), locks=True, changes=("tickets",))

    def _take_away(self, run: str, *, force: bool) -> None:
        """Becomes the run's leader, so that no learner can. Actors skip the run, and live ones exit."""
        call = new_request_id()
        take = """UPDATE runs SET incarnation = incarnation + 1, holder = :holder, lead_by = :call,
            lead_expires_s = {now} + :lease_s, finished_step = coalesce(finished_step, 0),
            finished_s = coalesce(finished_s, {now})
            WHERE run = :run AND coalesce(lead_by, '') <> :call
                AND (:force = 1 OR holder IS NULL OR holder = :holder OR lead_expires_s <= {now})"""
        given: dict[str, object] = {"holder": DROPPER, "call": call, "lease_s": _DROP_S, "force": int(force)}
        ask = "SELECT lead_by, holder FROM runs WHERE run = :run"
        steps = (_step(take, run, **given), _step(ask, run))
        lead_by, owner = self._write(run, *steps, locks=True, changes=("run",))[1][0]
        if lead_by != call:
            raise ValueError(f"run {run} has a learner, at {owner}: stop it, or set --force")

    def _read(self, sql: str, /, **params: Any) -> list[Row]:
        return self._database.read("", Statement(sql, params))

    def _write(self, run: str, *steps: Statement, locks: bool = False, **options: Any) -> list[list[Row]]:
        return self._database.write(run, Transaction(steps=steps, locks=locks, **options))


_RUNS = "SELECT run, CASE WHEN lead_expires_s > {now} THEN holder END, finished_step FROM runs ORDER BY run"
_TRAINED = f"SELECT run, {NUM_TICKETS} FROM tickets WHERE kind = 'train' AND state = 'acknowledged' GROUP BY run"
_SIZES = """SELECT run, sum(num_bytes), sum(num_objects) FROM (
        SELECT run, length(payload) AS num_bytes, CASE WHEN object IS NULL THEN 0 ELSE 1 END AS num_objects
        FROM payloads
        UNION ALL SELECT run, length(payload), 0 FROM tickets
        UNION ALL SELECT run, length(content), 0 FROM blobs
        UNION ALL SELECT run, length(ms), 0 FROM anchors) AS parts
    GROUP BY run"""


@contextlib.contextmanager
def open_runs(url: str, *, retry_s: float = 10.0) -> Generator[Runs]:
    """Opens the runs of a store; creates nothing if there is no store.

    Raises ValueError if the store does not exist or rejects the login, or the role is not a learner's. Raises
    StoreLostError if the server is unreachable, and StoreBusyError if the file stayed locked.
    """
    if path := sqlite_path(url):
        if not path.is_file():
            raise ValueError(f"store {path} does not exist")
        with contextlib.closing(SqliteDatabase(path, busy_timeout_s=retry_s)) as file:
            yield Runs(file, place=str(path), names=None)
        return
    with contextlib.closing(PostgresDatabase(url, retry_s=retry_s)) as database:
        database.retry(tables_and_roles.check_schema)
        database.retry(tables_and_roles.check_learner)
        yield Runs(database, place=database.place, names=lambda: database.retry(tables_and_roles.name_runs))


def _step(sql: str, run: str, /, **params: Any) -> Statement:
    return Statement(sql, {"run": run, **params})
