"""A real PostgreSQL server for tests: one a pytest process, a fresh database a test.

`postgres` is the server, `database` the URL of an empty database of its own, as the superuser; `start_server` starts
another one, for tests that kill it. Where it can't run the tests are skipped, and say why.
"""

import itertools
import os
import pathlib
import random
import shutil
import socket
import tempfile
import urllib.parse
from collections.abc import Generator

import psycopg
import pytest
from psycopg import sql

from bridge.store.postgres.tables_and_roles import make_schema
from launch.tools.store_server.postgres_server import SUPERUSER, PostgresServer, programs

LEARNER, ACTOR = "test_learner", "test_actor"
"""Roles that log in, in the stores that `create_store` makes."""
PASSWORD = "a password of the tests"
"""Of every role that `create_role` makes."""

# Below the kernel's ephemeral ports: a client that keeps dialing a dead server's port could get that port for its own
# end, and would connect to itself.
PORTS = range(20000, 32000)

# Durable (fsync is on), and small: the tests' memory and cores are shared.
SETTINGS: dict[str, str | int] = {
    "shared_buffers": "32MB",
    "max_connections": 100,
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "max_wal_size": "1GB",
    "checkpoint_timeout": "1h",
    "io_method": "sync",
    "jit": "off",
    "autovacuum_naptime": "1h",
    "restart_after_crash": "off",
    "recovery_init_sync_method": "syncfs",
    "log_min_messages": "log",
    "timezone": "UTC",
}


def need_tls() -> None:
    """Skips a test where no PostgreSQL with TLS is installed."""
    try:
        programs(tls=True)
    except ValueError as e:
        pytest.skip(f"no PostgreSQL with TLS here: {e}")


def free_port(host: str) -> int:
    """A free port; ValueError where none of 200 is free, or `host` is no address of this machine."""
    for port in random.sample(PORTS, 200):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as e:
                problem = e
                continue
            return port
    raise ValueError(f"no free port at {host}: {problem}")


class Server:
    """A running PostgreSQL of this process."""

    def __init__(self, cluster: PostgresServer) -> None:
        self.cluster, self.host, self.port = cluster, cluster.host, cluster.port
        self._names = itertools.count()

    def url(self, user: str = SUPERUSER, database: str = "postgres", **params: str) -> str:
        """Where a role reaches a database: over TCP, without a password."""
        query = f"?{urllib.parse.urlencode(params)}" if params else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql://{urllib.parse.quote(user)}@{host}:{self.port}/{database}{query}"

    @property
    def admin_url(self) -> str:
        """The superuser's, by socket."""
        return self.cluster.admin_url

    def execute(self, statement: sql.Composed | sql.SQL) -> None:
        """One statement of the superuser's, in the database `postgres`."""
        with psycopg.connect(self.admin_url, autocommit=True) as db:
            db.execute(statement)

    def create_role(self, name: str) -> None:
        """A role that may log in and nothing else; one that is there stays."""
        with psycopg.connect(self.admin_url, autocommit=True) as db:
            if db.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,)).fetchone() is None:
                words = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
                db.execute(words.format(sql.Identifier(name), sql.Literal(PASSWORD)))

    def create_database(self, name: str | None = None, *, owner: str = SUPERUSER) -> str:
        """An empty database; returns its name."""
        name = name or f"test_{os.getpid()}_{next(self._names)}"
        words = sql.SQL("CREATE DATABASE {} OWNER {}")
        self.execute(words.format(sql.Identifier(name), sql.Identifier(owner)))
        return name

    def create_store(self) -> tuple[str, str]:
        """A database that holds an empty store; the URLs of a learner's role and of an actor's."""
        name = self.create_database()
        for role in (LEARNER, ACTOR):
            self.create_role(role)
        with psycopg.connect(self.admin_url, dbname=name, autocommit=True) as db:
            make_schema(db)
            db.execute(sql.SQL("GRANT sluice_learner TO {}").format(sql.Identifier(LEARNER)))
            db.execute(sql.SQL("GRANT sluice_actor TO {}").format(sql.Identifier(ACTOR)))
        return self.url(LEARNER, name), self.url(ACTOR, name)

    def drop_database(self, name: str) -> None:
        """Drops it, whoever is connected."""
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def stop(self) -> None:
        """An orderly end; `restart` may follow."""
        self.cluster.stop()

    def close(self) -> None:
        """`stop`, for good."""
        self.cluster.stop()

    def kill(self) -> None:
        """SIGKILL of the whole server."""
        self.cluster.kill()

    def restart(self) -> None:
        """Starts it again at the same port, after `stop` or `kill`; where it still runs, it is stopped first."""
        self.cluster.stop()
        self.cluster.start()


def start_server(folder: pathlib.Path, *, listen: str = "127.0.0.1") -> Server:
    """Starts a server whose data folder is new, and that ends with this process; anybody may be any role.

    As root the folder must be one that an unprivileged user may enter (`data_folder`).
    """
    cluster = PostgresServer(folder, host=listen, port=free_port(listen))
    cluster.create(sync=False)
    cluster.configure(SETTINGS, hba=["local all all trust", "host all all all trust"])
    cluster.start()
    return Server(cluster)


@pytest.fixture(scope="session")
def data_folder() -> Generator[pathlib.Path]:
    """A folder for servers' data: pytest's own can't be entered by the user that root's servers run as."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-pg-data-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(data_folder: pathlib.Path) -> Generator[Server]:
    """The server that this process's tests share; nobody stops it."""
    try:
        server = start_server(data_folder / "shared")
    except ValueError as e:
        pytest.skip(f"no PostgreSQL here: {e}")
    yield server
    server.close()


@pytest.fixture
def database(postgres: Server) -> Generator[str]:
    """The URL of an empty database that only this test has, as the superuser."""
    name = postgres.create_database()
    yield postgres.url(database=name)
    postgres.drop_database(name)


@pytest.fixture(scope="module")
def module_database(postgres: Server) -> Generator[str]:
    """The URL of a database that a module's tests share, as the superuser."""
    name = postgres.create_database()
    yield postgres.url(database=name)
    postgres.drop_database(name)
