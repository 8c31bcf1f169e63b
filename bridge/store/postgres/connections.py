"""Connections, conninfo and TLS policy.

PGHOST, PGHOSTADDR, PGSSLMODE and a service's file (PGSERVICE) lead elsewhere as well as a URL does; whether a server is
on this machine, and whether the connection proves that it is the right one, is looked at here and nowhere else.

A process works with one, besides that which listens: a server has few, and a cluster many actors. Calls take turns on
it; only where one takes long is another connection made, and closed again when it is not needed any more.

Not psycopg_pool: it connects in threads of its own, whose errors nobody sees and whose pauses grow past the time in
which a healed network is to be noticed.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.store.postgres.errors import connecting_heals, explain
from bridge.store.sql.database import StoreClosedError
from bridge.validation import is_loopback


@dataclasses.dataclass(frozen=True, slots=True)
class LibpqTarget:
    """Where connections of a URL go."""

    place: str
    """Which database, without any secret."""
    hosts: tuple[str, ...]
    """All that are tried: addresses, names, sockets' folders; empty: the socket that libpq was built with."""
    sslmode: str
    """libpq's."""

    @property
    def is_here(self) -> bool:
        """Whether all of them are this machine's: loopback or a socket."""
        return all(not host or host.startswith(("/", "@")) or is_loopback(host) for host in self.hosts)


def parse(url: str) -> dict[str, Any]:
    """What a URL says, by libpq's own reading.

    Raises:
      ValueError: it is none of PostgreSQL's.
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
    if "service" in given:
        raise ValueError("the store's URL names a service; give host and sslmode in it, or the service by PGSERVICE")
    return given


def libpq_target_of(url: str) -> LibpqTarget:
    """Where connections of a URL would go from here, now.

    Raises:
      ValueError: it is none of PostgreSQL's.
    """
    given = parse(url)
    # The environment and its service's file, as libpq merges them; then what it was built with.
    defaults = {o.keyword.decode(): (o.val or b"").decode() for o in psycopg.pq.Conninfo.get_defaults()}
    settings: dict[str, Any] = {**defaults, **given}
    # An address in the list goes before the name at its place; one left out leaves the name.
    addresses, names = (f"{settings.get(k) or ''}".split(",") for k in ("hostaddr", "host"))
    hosts = tuple(a.strip() or n.strip() for a, n in itertools.zip_longest(addresses, names, fillvalue=""))
    return LibpqTarget(server_address(given), hosts, f"{settings.get('sslmode') or ''}")


def check_encrypted(way: LibpqTarget) -> None:
    """Refuses a server on another machine that would be talked to without TLS, or without proof that it is the one.

    `prefer`, which libpq takes by itself, anybody between may talk out of TLS.

    Raises:
      ValueError: says what to add.
    """
    if not way.is_here and way.sslmode != "verify-full":
        raise ValueError(
            f"{way.place} is on another machine, and sslmode={way.sslmode} does not prove that it is the right "
            "server: add ?sslmode=verify-full, and name whoever signed its certificate by PGSSLROOTCERT"
        )


def server_address(given: Mapping[str, Any]) -> str:
    """Which database, without any secret."""
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}"


Connection = psycopg.Connection[Any]


_TURN_S = 0.1
"""How long a call waits for a connection that is in use: most are done with it sooner, a large group is not."""
_IDLE_S = 10.0
"""One that was not needed for so long is closed, as long as there is another."""


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
        way = libpq_target_of(url)
        check_encrypted(way)
        self.place = way.place
        self._conninfo = make_conninfo("", **{**_CLIENT, **parse(url)})
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[tuple[Connection, float]] = []
        """With the time since which each is, the last one used last."""
        self._borrowed: set[Connection] = set()
        self._num_lent = 0
        """Borrowed, or being made for somebody."""
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
        for connection, _ in idle:
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
            self._changed.wait_for(lambda: self._idle or not self._num_lent or self.closed.is_set(), _TURN_S)
            connection = self._idle.pop()[0] if self._idle else None
            self._num_lent += 1
        try:
            connection = connection or self.connect()
        except BaseException:
            with self._changed:
                self._num_lent -= 1
                self._changed.notify_all()
            raise
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
        now = time.monotonic()
        with self._changed:
            self._borrowed.discard(connection)
            self._num_lent -= 1
            spare = [] if keep else [connection]
            if keep:
                spare += [other for other, since in self._idle if now - since >= _IDLE_S]
                self._idle = [(other, since) for other, since in self._idle if other not in spare]
                self._idle.append((connection, now))
            self._changed.notify_all()
        for one in spare:
            one.close()

    def _check_open(self) -> None:
        if self.is_of_another_process:
            raise RuntimeError(f"the store at {self.place} was opened before a fork; each process opens its own")
        if self.closed.is_set():
            raise StoreClosedError(f"the store at {self.place} was closed")


def cut(connection: Connection) -> None:
    """Ends a connection that another thread may be waiting on; that thread gets an error and closes it."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
