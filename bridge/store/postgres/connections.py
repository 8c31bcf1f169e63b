"""Connections to one PostgreSQL database: made when needed, kept for the next call, cut when the store is closed.

Not psycopg_pool: it connects in threads of its own, whose errors nobody sees and whose pauses grow past the time in
which a healed network is to be noticed.
"""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Generator, Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.buckets import is_loopback
from bridge.store.postgres.errors import connecting_heals, explain
from bridge.store.sql.script import StoreClosedError

Connection = psycopg.Connection[Any]

# Of libpq, for this end, unless the URL says otherwise: a server that is gone is noticed within seconds.
_CLIENT: Mapping[str, str | int] = {
    "connect_timeout": 4,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    "application_name": "sluice",
}
# Of the server, for its end of this connection: a client that is gone holds nothing for longer than seconds.
_SESSION: Mapping[str, str] = {
    "search_path": "sluice, pg_temp",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "8000",
    "idle_in_transaction_session_timeout": "5s",
    "lock_timeout": "30s",
    "statement_timeout": "300s",  # its rows may go over a slow network
    "synchronous_commit": "on",
    "client_min_messages": "warning",
}


class Connections:
    """Of one process; any number of threads."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Raises:
          ValueError: the URL is none of PostgreSQL's.
        """
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError as e:
            # What libpq says may quote a part of the password.
            parameter = re.search(r'invalid URI query parameter: "(\w+)"', str(e))
            raise ValueError(
                "the store's URL can't be read; it is postgresql://user@host:port/database?sslmode=verify-full, with "
                f"%XX for what is special{f'; {parameter[1]} is no parameter' if parameter else ''}"
            ) from None
        self.place = place_of(given)
        check_encrypted(given, place=self.place)
        self._conninfo = make_conninfo("", **{**_CLIENT, **given})
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._borrowed: set[Connection] = set()
        self._has_worked = False
        self.closed = threading.Event()

    @property
    def is_of_another_process(self) -> bool:
        """Whether they were opened before a fork."""
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def borrow(self) -> Generator[Connection]:
        """One for this thread, for a while; one that broke is not lent again.

        Raises:
          StoreClosedError: `close` was called, before or meanwhile.
          ValueError: the server refuses us, and always did.
          psycopg.OperationalError: it can't be reached.
        """
        connection = self._take()
        try:
            yield connection
        except BaseException:
            self._give_back(connection, is_sound=False)
            if self.closed.is_set():
                raise StoreClosedError(f"the store at {self.place} was closed") from None
            raise
        self._give_back(connection, is_sound=True)

    def connect(self) -> Connection:
        """A new one, which the caller closes.

        Raises:
          ValueError: the server refuses us, and always did.
          psycopg.OperationalError: it can't be reached; or refuses us now, as it did not before.
        """
        self._check_open()
        try:
            connection = psycopg.connect(self._conninfo, autocommit=True)
            settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SESSION.items())
            connection.execute(f"SELECT {settings}".encode())
        except psycopg.Error as e:
            # What worked once may be in the middle of a move to another machine.
            if self._has_worked or connecting_heals(e):
                raise
            raise ValueError(explain(e, place=self.place)) from None
        self._has_worked = True
        return connection

    def drop_idle(self) -> None:
        """Closes those that nobody uses: after one broke, the others most likely are."""
        with self._changed:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Cuts what is under way and closes all."""
        if self.is_of_another_process:
            return
        self.closed.set()
        self.drop_idle()
        with self._changed:
            for connection in self._borrowed:
                cut(connection)
            self._changed.wait_for(lambda: not self._borrowed, timeout=5.0)

    def _take(self) -> Connection:
        self._check_open()
        with self._changed:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self.connect()
        with self._changed:
            self._borrowed.add(connection)
            # Either `close` sees this connection and cuts it, or this sees that it was called.
            is_late = self.closed.is_set()
        if is_late:
            self._give_back(connection, is_sound=False)
            self._check_open()
        return connection

    def _give_back(self, connection: Connection, *, is_sound: bool) -> None:
        keep = is_sound and not connection.closed and not self.closed.is_set()
        with self._changed:
            self._borrowed.discard(connection)
            if keep:
                self._idle.append(connection)
            self._changed.notify_all()
        if not keep:
            connection.close()

    def _check_open(self) -> None:
        if self.is_of_another_process:
            raise RuntimeError(f"the store at {self.place} was opened before a fork; each process opens its own")
        if self.closed.is_set():
            raise StoreClosedError(f"the store at {self.place} was closed")


def cut(connection: Connection) -> None:
    """Ends a connection that another thread may be waiting on; that thread gets an error and closes it."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def check_encrypted(given: Mapping[str, Any], *, place: str) -> None:
    """Refuses a server on another machine that would be talked to without TLS, or without proof that it is the one.

    What the URL leaves out is libpq's: its environment (PGHOST, PGSSLMODE), and then `prefer`, which anybody between
    may talk out of TLS.

    Raises:
      ValueError: says what to add.
    """
    defaults = {o.keyword.decode(): (o.val or b"").decode() for o in psycopg.pq.Conninfo.get_defaults()}
    settings = {**defaults, **given}
    hosts = f"{settings.get('hostaddr') or settings.get('host') or ''}".split(",")
    is_here = all(not host or host.startswith(("/", "@")) or is_loopback(host) for host in hosts)
    if not is_here and settings.get("sslmode") != "verify-full":
        raise ValueError(
            f"{place} is on another machine, and sslmode={settings.get('sslmode')} does not prove that it is the right "
            "server: add ?sslmode=verify-full, and name whoever signed its certificate by PGSSLROOTCERT"
        )


def place_of(given: Mapping[str, Any]) -> str:
    """Which database, without any secret."""
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}"
