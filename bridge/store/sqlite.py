"""The store on one machine: a SQLite file that any number of processes open.

A claimed ticket is leased, and the lease is only a promise not to offer it to others for a while:
whoever hands in the first complete group wins, lease or no lease.
"""

import os
from collections.abc import Callable

from bridge import codec
from bridge.store.sql.store import SqlStore
from bridge.store.sqlite_database import SqliteDatabase
from bridge.store.sqlite_schema import RUN


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
