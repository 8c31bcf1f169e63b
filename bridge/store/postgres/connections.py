"""Connections to a PostgreSQL server, and their TLS policy.

PGHOST, PGHOSTADDR, PGSSLMODE and a service file (PGSERVICE) can redirect a connection as well as the URL. This module
is the only place that decides if a server is on this machine and if the connection verifies its identity.

A process works with one connection and one more for notifications, because a server has few and a cluster many actors.
Calls take turns. If a call takes long, another connection is opened, and closed again when idle.

psycopg_pool is not used: its background threads hide connection errors, and its pauses grow too long to notice a
recovered network in time.
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
    """Target of a URL's connections."""

    place: str
    """URL of the database without secrets."""
    hosts: tuple[str, ...]
    """All hosts that are tried: addresses, names and socket folders; an empty string is libpq's default socket."""
    sslmode: str

    @property
    def is_here(self) -> bool:
        """True if all hosts are on this machine: loopback or a socket."""
        return all(not host or host.startswith(("/", "@")) or is_loopback(host) for host in self.hosts)


def parse(url: str) -> dict[str, Any]:
    """Returns the settings in a URL, as parsed by libpq. Raises ValueError if it is malformed, or names a service."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as e:
        # libpq's message may quote a part of the password.
        parameter = re.search(r'invalid URI query parameter: "(\w+)"', str(e))
        raise ValueError(
            "--store: expected postgresql://user@host:port/database?sslmode=verify-full, with special characters as "
            f"%XX{f'; unknown parameter {parameter[1]}' if parameter else ''}"
        ) from None
    if "service" in given:
        raise ValueError(
            "--store: the URL must not name a service; set host and sslmode in it, or the service by PGSERVICE"
        )
    return given


def libpq_target_of(url: str) -> LibpqTarget:
    """Returns the target of a URL's connections in the current environment. Raises ValueError as `parse`."""
    given = parse(url)
    # Environment and service file as libpq merges them, with libpq's built-in defaults.
    defaults = {o.keyword.decode(): (o.val or b"").decode() for o in psycopg.pq.Conninfo.get_defaults()}
    settings: dict[str, Any] = {**defaults, **given}
    # Each address takes precedence over the name at its position in the list; an empty one leaves the name.
    addresses, names = (f"{settings.get(k) or ''}".split(",") for k in ("hostaddr", "host"))
    hosts = tuple(a.strip() or n.strip() for a, n in itertools.zip_longest(addresses, names, fillvalue=""))
    return LibpqTarget(server_address(given), hosts, f"{settings.get('sslmode') or ''}")


def check_encrypted(way: LibpqTarget) -> None:
    """Raises ValueError if a server on another machine would be used without verified TLS.

    libpq's default `prefer` is not enough: an attacker on the network can disable its TLS.
    """
    if not way.is_here and way.sslmode != "verify-full":
        raise ValueError(
            f"{way.place} is on another machine, and sslmode={way.sslmode} does not verify the server's identity: "
            "add ?sslmode=verify-full, and set PGSSLROOTCERT to the certificate of its CA"
        )


def server_address(given: Mapping[str, Any]) -> str:
    """Returns the URL of the database without secrets."""
    user = f"{given['user']}@" if given.get("user") else ""
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}"


Connection = psycopg.Connection[Any]


_TURN_S = 0.1
"""Seconds to wait for the connection in use before another is opened. Most calls are shorter; large groups are not."""
_IDLE_S = 10.0
"""Seconds after which an idle connection is closed, if there is another one."""


# libpq settings of this end, unless the URL overrides them: a dead server is noticed within seconds.
_CLIENT: Mapping[str, str | int] = {
    "connect_timeout": 4,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    "application_name": "sluice",
}
# Server settings of this connection: a dead client holds nothing for longer than seconds.
_SESSION: Mapping[str, str] = {
    "search_path": "sluice, pg_temp",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "8000",
    "idle_in_transaction_session_timeout": "5s",
    "lock_timeout": "30s",
    "statement_timeout": "300s",  # includes sending rows over a slow network
    "synchronous_commit": "on",
    "client_min_messages": "warning",
}


class Connections:
    """Connections of one process. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Parses the URL; opens no connection. Raises ValueError if it is malformed, or fails `check_encrypted`."""
        way = libpq_target_of(url)
        check_encrypted(way)
        self.place = way.place
        self._conninfo = make_conninfo("", **{**_CLIENT, **parse(url)})
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: list[tuple[Connection, float]] = []
        """Idle connections and the times since which they are idle; the last used is last."""
        self._borrowed: set[Connection] = set()
        self._num_lent = 0
        """Number of connections that are borrowed or being opened."""
        self._has_worked = False
        self.closed = threading.Event()

    @property
    def is_of_another_process(self) -> bool:
        """True after a fork, in the child process."""
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def borrow(self) -> Generator[Connection]:
        """Lends a connection to this thread, dropped if it broke. Raises as `connect`, also during the loan."""
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
        """Opens a connection, which the caller must close.

        Raises:
          StoreClosedError: `close` was called.
          ValueError: the server rejects the login and never accepted it.
          psycopg.OperationalError: the server is unreachable, or rejects a login that it accepted before.
        """
        self._check_open()
        try:
            connection = psycopg.connect(self._conninfo, autocommit=True)
            settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SESSION.items())
            connection.execute(f"SELECT {settings}".encode())
        except psycopg.Error as e:
            # A server that worked before may be failing over, so retry.
            if self._has_worked or connecting_heals(e):
                raise
            raise ValueError(explain(e, place=self.place)) from None
        self._has_worked = True
        return connection

    def drop_idle(self) -> None:
        """Closes the idle connections, which are probably broken as well after one broke."""
        with self._changed:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def close(self) -> None:
        """Aborts running calls and closes all connections."""
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
            # Either `close` sees this connection and cuts it, or this thread sees `closed`.
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
    """Shuts down a connection that another thread may be waiting on. That thread gets an error and closes it."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
