"""Store of a URL; creates and finds runs.

A claimed ticket is leased, and the lease is only a promise not to offer it to others for a while:
whoever hands in the first complete group wins, lease or no lease.
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
from bridge.store.sqlite_database import RUN, SqliteDatabase
from bridge.store.store_types import StoreLostError

_FAREWELL_S = 2.0


class SqlStore(LearnerStore, ActorStore):
    """One run in a database; safe to use from several threads, closed before a fork."""

    @override
    def close(self) -> None:
        # Whoever can't say so ends its lead by the database's clock.
        try:
            with contextlib.suppress(StoreLostError, RuntimeError, ValueError):  # a run that was dropped, too
                self.release_leadership(timeout_s=_FAREWELL_S)
                self._give_names_back(timeout_s=_FAREWELL_S)
        finally:
            super().close()


class PostgresStore(SqlStore):
    """One run of a database; safe to use from several threads, closed before a fork."""

    def __init__(self, url: str, *, run: str, retry_s: float = 600.0, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """Opens a run that is there (`create_run`).

        Args:
          url: postgresql://user@host/database?sslmode=verify-full.
          run: its id.
          retry_s: how long a server that can't be reached is tried again, now and in every call.
          max_message_bytes: size of the largest message.

        Raises:
          ValueError: the server refuses us, or has no such run for this role, or tables of another format.
          StoreLostError: it could not be reached.
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
    """One file, for any number of processes; safe to use from several threads, closed before a fork."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        busy_timeout_s: float = 30.0,
        clock: Callable[[], float] | None = None,
        max_message_bytes: int = codec.MAX_BYTES,
    ) -> None:
        """Opens the file, or makes it and its folder; `clock` as in `SqliteClock`.

        Any call raises `sqlite_database.StoreBusyError` when another process keeps the file locked
        for longer than `busy_timeout_s`.

        Raises:
          ValueError: the file is no Sluice store, or is one of another `codec.FORMAT`.
        """
        database = SqliteDatabase(path, busy_timeout_s=busy_timeout_s, clock=clock)
        super().__init__(database, run=RUN, max_message_bytes=max_message_bytes)


class NoRunError(ValueError):
    """The store has no such run, or none that we may see; it may be made any moment."""


class FinishedRunError(NoRunError):
    """There is such a run, and it is finished; its learner may take it up again, or another one of its name begin."""


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
    inline_bytes: int = 4 * 2**20,
) -> SqlStore:
    """A run's store: what actors open, and the learner after `create_run`.

    Args:
      url: sqlite:///FILE (one run a file) or postgresql://user@host/database?sslmode=verify-full.
      run: the run's id; a SQLite file holds one run, whatever its id.
      busy_timeout_s: how long a SQLite file that others keep locked is waited for.
      retry_s: how long a PostgreSQL server that can't be reached is tried again, now and in every call.
      max_message_bytes: size of the largest message.
      bucket: s3://..., gs://... or file:///... for groups of more than `inline_bytes`; empty: all stay in the database.
      inline_bytes: size of the largest group that stays there where there is a bucket.

    Raises:
      ValueError: there is no such store, or it refuses us; one line says why.
      StoreLostError, StoreBusyError: it could not be reached, or not be locked, in time.
    """
    objects = GroupBlobs(bucket, run=run, max_bytes=max_message_bytes, retry_s=retry_s) if bucket else None
    store: SqlStore
    if path := sqlite_path(url):
        store = SqliteStore(path, busy_timeout_s=busy_timeout_s, max_message_bytes=max_message_bytes)
    else:
        store = PostgresStore(url, run=run, retry_s=retry_s, max_message_bytes=max_message_bytes)
    if objects is not None:
        store.use_bucket(objects, inline_bytes=inline_bytes)
    return store


def create_run(url: str, *, run: str, name: str, actor_role: str, retry_s: float = 600.0) -> None:
    """Makes a run in its store, and the store where there is none; what is there stays, but `actor_role` is as given.

    For the learner.

    Args:
      url: as in `open_store`.
      run: the run's id.
      name: what people call it.
      actor_role: role of the database whose members may serve it.
      retry_s: as in `open_store`.

    Raises:
      ValueError: the store refuses us; one line says why.
      StoreLostError: it could not be reached.
    """
    if sqlite_path(url):
        return
    with contextlib.closing(PostgresDatabase(url, retry_s=retry_s)) as database:
        database.retry(tables_and_roles.make_schema)
        database.retry(lambda db: tables_and_roles.make_run(db, run, name=name, actor_role=actor_role))


def find_runs(url: str, name_or_id: str, *, retry_s: float = 600.0) -> list[FoundRun]:
    """The runs of that name or id that a PostgreSQL URL's role may serve or lead, the newest first.

    Raises:
      ValueError: the server refuses us, or has no store.
      StoreLostError: it could not be reached.
    """
    with contextlib.closing(PostgresDatabase(url, retry_s=retry_s)) as database:
        database.retry(tables_and_roles.check_schema)
        return database.retry(lambda db: tables_and_roles.find_runs(db, name_or_id))


def find_run(url: str, name_or_id: str, *, retry_s: float = 600.0) -> str:
    """The id of the run that people call so and that is not finished, for `open_store`.

    Raises:
      FinishedRunError: all that there are are finished.
      NoRunError: none that this role may serve.
      ValueError: several (with their ids); or the store refuses us.
      StoreLostError: it could not be reached.
    """
    if path := sqlite_path(url):
        if not path.is_file():
            raise NoRunError(f"there is no store {path}; is the run's learner started?")
        with contextlib.closing(SqliteStore(path)) as store:
            finished = store.finished()
        found = [FoundRun(name_or_id, None if finished is None else finished.version.step)]
    else:
        found = find_runs(url, name_or_id, retry_s=retry_s)
    if not found:
        raise NoRunError(f"the store has no run {name_or_id!r} that this role may serve; is its learner started?")
    found = [r for r in found if r.run == name_or_id] or found
    going_on = [r.run for r in found if r.finished_step is None]
    if not going_on:
        raise FinishedRunError(f"run {name_or_id} is finished, at step {found[0].finished_step}")
    if len(going_on) > 1:
        raise ValueError(
            f"{len(going_on)} runs are called {name_or_id!r}; give one's id, the newest first: {', '.join(going_on)}; "
            "or have whoever leads them drop the others (python -m launch.tools.runs)"
        )
    return going_on[0]


def namesakes(url: str, name: str, *, run: str, retry_s: float = 600.0) -> list[str]:
    """Ids of other runs of that name that are not finished; `find_run` can't choose between them and `run`.

    Raises:
      ValueError: the store refuses us.
      StoreLostError: it could not be reached.
    """
    if sqlite_path(url):
        return []
    found = find_runs(url, name, retry_s=retry_s)
    return [r.run for r in found if r.run != run and r.finished_step is None]


def sqlite_path(url: str) -> pathlib.Path | None:
    """The file of a sqlite:/// URL; None for PostgreSQL's.

    Raises:
      ValueError: neither.
    """
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return pathlib.Path(url.removeprefix(_SQLITE))
    if not url.startswith(_POSTGRES):
        raise ValueError(f"a store's URL is sqlite:///FILE or postgresql://user@host/database, got {_scheme(url)!r}")
    return None


def _scheme(url: str) -> str:
    """What may be shown of a URL that may hold a password."""
    return f"{url.partition('://')[0]}://..." if "://" in url else url
