"""Opens a store by its URL; creates and finds runs.

A claimed ticket is leased. The lease only promises not to offer the ticket to other actors for a while. The first
submitted complete group wins, with or without a lease.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable

from typing_extensions import override

from bridge import codec
from bridge.store.group_blobs import GroupBlobs
from bridge.store.postgres import tables_and_roles
from bridge.store.postgres.postgres_database import PostgresDatabase
from bridge.store.postgres.tables_and_roles import FoundRun
from bridge.store.sql.actor_side import ActorStore
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.sqlite_database import SqliteDatabase
from bridge.store.sqlite_schema import RUN
from bridge.store.store_types import StoreLostError

_FAREWELL_S = 2.0
INLINE_BYTES = 4 * 2**20
"""Largest group that stays in the database of a store with a bucket, in bytes."""


class SqlStore(LearnerStore, ActorStore):
    """Store of one run. Thread-safe; must be closed before a fork."""

    @override
    def close(self) -> None:
        # If the release fails, the lease expires by the database's clock.
        try:
            with contextlib.suppress(StoreLostError, RuntimeError, ValueError):  # includes a dropped run
                self.release_leadership(timeout_s=_FAREWELL_S)
                self._give_names_back(timeout_s=_FAREWELL_S)
        finally:
            super().close()


class PostgresStore(SqlStore):
    """Store of one run in a PostgreSQL database. Thread-safe; must be closed before a fork."""

    def __init__(self, url: str, *, run: str, retry_s: float = 600.0, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """Opens an existing run (`create_run`). Calls retry for `retry_s` seconds while the server is unreachable.

        Raises ValueError if the server rejects the login, has no such run for this role, or has tables of another
        format, and StoreLostError if the server is unreachable.
        """
        database = PostgresDatabase(url, retry_s=retry_s)
        super().__init__(database, run=run, max_message_bytes=max_message_bytes)
        try:
            database.retry(tables_and_roles.check_schema)
            if not database.retry(lambda db: tables_and_roles.find_runs(db, run)):
                raise ValueError(f"the store has no run {run}, or this role may not serve it")
        except BaseException:
            database.close()
            raise


class SqliteStore(SqlStore):
    """Store of one run in a file, for any number of processes. Thread-safe; must be closed before a fork."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout_s: float = 30.0,
        clock: Callable[[], float] | None = None,
        max_message_bytes: int = codec.MAX_BYTES,
    ) -> None:
        """Opens the file; creates the file and its folder if missing. `clock` is as in `SqliteClock`.

        Every call raises `sqlite_database.StoreBusyError` if another process locks the file for more than
        `busy_timeout_s`. Raises ValueError if the file is not a Sluice store, or has another `codec.FORMAT`.
        """
        database = SqliteDatabase(path, busy_timeout_s=busy_timeout_s, clock=clock)
        super().__init__(database, run=RUN, max_message_bytes=max_message_bytes)


class NoRunError(ValueError):
    """Error for a run that the store does not have for this role; it may be created later."""


class FinishedRunError(NoRunError):
    """Error for a finished run. Its learner may resume it, or a new run may take its name."""


_SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")


def open_store(
    url: str,
    *,
    run: str,
    busy_timeout_s: float = 30.0,
    retry_s: float = 600.0,
    max_message_bytes: int = codec.MAX_BYTES,
    bucket: str = "",
) -> SqlStore:
    """Opens the store of a run, for actors and, after `create_run`, for the learner.

    Raises ValueError if the store does not exist or rejects the login, StoreLostError if the server is unreachable, and
    StoreBusyError if the file stayed locked.

    Args:
      url: sqlite:///FILE (one run per file) or postgresql://user@host/database?sslmode=verify-full.
      run: id of the run; ignored for SQLite.
      busy_timeout_s: seconds to wait for a locked SQLite file.
      retry_s: seconds for which every call retries while a PostgreSQL server is unreachable.
      bucket: s3://..., gs://... or file:///... for groups of more than `INLINE_BYTES`; empty: all groups stay in the
        database.
    """
    objects = GroupBlobs(bucket, run=run, max_bytes=max_message_bytes, retry_s=retry_s) if bucket else None
    store: SqlStore
    if path := sqlite_path(url):
        store = SqliteStore(path, busy_timeout_s=busy_timeout_s, max_message_bytes=max_message_bytes)
    else:
        store = PostgresStore(url, run=run, retry_s=retry_s, max_message_bytes=max_message_bytes)
    if objects is not None:
        store.use_bucket(objects, inline_bytes=INLINE_BYTES)
    return store


def create_run(url: str, *, run: str, name: str, actor_role: str, retry_s: float = 600.0) -> None:
    """Creates a run, and its store if missing. An existing run stays, but gets the given `actor_role`.

    Only the learner calls it. Members of the database role `actor_role` may serve the run. Raises ValueError if the
    store rejects the login or the request, and StoreLostError if the server is unreachable.
    """
    if sqlite_path(url):
        return
    with contextlib.closing(PostgresDatabase(url, retry_s=retry_s)) as database:
        database.retry(tables_and_roles.make_schema)
        database.retry(lambda db: tables_and_roles.make_run(db, run, name=name, actor_role=actor_role))


def find_runs(url: str, name_or_id: str, *, retry_s: float = 600.0) -> list[FoundRun]:
    """Returns the runs of a PostgreSQL store with that name or id that this role may serve or lead, newest first.

    Raises ValueError if the server rejects the login, or has no store, and StoreLostError if the server is unreachable.
    """
    with contextlib.closing(PostgresDatabase(url, retry_s=retry_s)) as database:
        database.retry(tables_and_roles.check_schema)
        return database.retry(lambda db: tables_and_roles.find_runs(db, name_or_id))


def find_run(url: str, name_or_id: str, *, retry_s: float = 600.0) -> str:
    """Returns the id of the one unfinished run with that name or id, for `open_store`.

    Raises FinishedRunError or NoRunError if there is none, ValueError if several runs match (the message has their ids)
    or the store rejects the login, and StoreLostError if the server is unreachable.
    """
    if path := sqlite_path(url):
        if not path.is_file():
            raise NoRunError(f"store {path} does not exist; start the run's learner first")
        with contextlib.closing(SqliteStore(path)) as store:
            finished = store.finished()
        found = [FoundRun(name_or_id, None if finished is None else finished.version.step)]
    else:
        found = find_runs(url, name_or_id, retry_s=retry_s)
    if not found:
        raise NoRunError(f"the store has no run {name_or_id!r} that this role may serve; start its learner first")
    found = [r for r in found if r.run == name_or_id] or found
    going_on = [r.run for r in found if r.finished_step is None]
    if not going_on:
        raise FinishedRunError(f"run {name_or_id} is finished, at step {found[0].finished_step}")
    if len(going_on) > 1:
        raise ValueError(
            f"{len(going_on)} runs have the name {name_or_id!r}; use an id, newest first: {', '.join(going_on)}; or "
            "have their owner drop the others (python -m launch.tools.runs)"
        )
    return going_on[0]


def namesakes(url: str, name: str, *, run: str, retry_s: float = 600.0) -> list[str]:
    """Returns the ids of other unfinished runs with that name, which `find_run` cannot tell from `run`.

    Raises ValueError if the store rejects the login, and StoreLostError if the server is unreachable.
    """
    if sqlite_path(url):
        return []
    found = find_runs(url, name, retry_s=retry_s)
    return [r.run for r in found if r.run != run and r.finished_step is None]


def sqlite_path(url: str) -> pathlib.Path | None:
    """Returns the file of a sqlite:/// URL; None for a PostgreSQL URL. Raises ValueError if the URL is neither."""
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return pathlib.Path(url.removeprefix(_SQLITE))
    if not url.startswith(_POSTGRES):
        raise ValueError(f"--store: expected sqlite:///FILE or postgresql://user@host/database, got {_scheme(url)!r}")
    return None


def _scheme(url: str) -> str:
    """Returns the part of a URL that is safe to show; the rest may hold a password."""
    return f"{url.partition('://')[0]}://..." if "://" in url else url
