"""Trial store: a PostgreSQL server with a database, two roles, their passwords, and TLS."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import secrets
import shlex
from collections.abc import Iterator

import psycopg
from psycopg import sql

from bridge.files import replace_file, try_flock
from bridge.store.postgres.tables_and_roles import ACTOR, LEARNER, make_schema, schema_sql
from bridge.validation import is_loopback
from launch.tools.store_server.postgres_server import PostgresServer

DATABASE = "sluice"
ROLES = {"learner": LEARNER, "actor": ACTOR}
"""Database role whose rights each login has."""
_MAX_LOG_BYTES = 16 * 2**20

SETTINGS: dict[str, str | int] = {
    "max_connections": 500,  # two per actor (docs/kubernetes.md)
    "timezone": "UTC",
    "authentication_timeout": "10s",
    # Bounds how long a suspended or disconnected client can hold locks in a transaction.
    "idle_in_transaction_session_timeout": "60s",
    "client_connection_check_interval": "10s",
    "tcp_keepalives_idle": "30s",
    "tcp_keepalives_interval": "10s",
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": "60s",
}


_TLS: dict[str, str | int] = {"ssl": "on", "ssl_min_protocol_version": "TLSv1.3"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialLocation:
    """Folder and address of a trial store."""

    folder: pathlib.Path
    host: str
    port: int
    advertise: str
    """Name or address that clients dial."""
    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for unreadable key files, or an unencrypted address outside loopback."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("--cert and --key require each other")
        for file in (self.certificate, self.key):
            if file is not None and not os.access(file, os.R_OK):
                raise ValueError(f"{file} cannot be read; --cert and --key must be PEM files")
        if not self.has_tls and not is_loopback(self.host):
            raise ValueError(
                f"--listen={self.host} is reachable from other machines without encryption; set --cert and --key "
                "(for a trial from python -m launch.tools.make_certificates), or listen at 127.0.0.1"
            )

    @property
    def has_tls(self) -> bool:
        """True if all connections are encrypted."""
        return self.certificate is not None

    def url(self, role: str) -> str:
        """Returns `store.url` for a role; the password is in `passfile`."""
        host = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return (
            f"postgresql://{role}@{host}:{self.port}/{DATABASE}?sslmode={'verify-full' if self.has_tls else 'disable'}"
        )

    def passfile(self, role: str) -> pathlib.Path:
        """Returns the file that PGPASSFILE must name for a role."""
        return self.folder / f"{role}.pgpass"

    def describe(self) -> str:
        """Returns the settings of both sides as shell commands."""
        lines: list[str] = []
        for role, flag in (("learner", "--config.store.url"), ("actor", "--store")):
            export = f"export PGPASSFILE={shlex.quote(str(self.passfile(role)))}"
            lines += [f"# {role}", export, f"{flag}='{self.url(role)}'", ""]
        if self.has_tls:
            lines.append("# both: PGSSLROOTCERT=FILE names the authority of the server's certificate (ca.pem)")
        return "\n".join(lines).rstrip()


@contextlib.contextmanager
def serving(place: TrialLocation) -> Iterator[PostgresServer]:
    """Serves a trial store within the context; creates it at first use.

    Raises ValueError if the folder is already served, or the server cannot be created or started.
    """
    folder = place.folder
    folder.mkdir(parents=True, exist_ok=True)
    # Root's server runs as another user, who must traverse this folder; its files have their own modes.
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_flock(lock, fcntl.LOCK_EX):
            raise ValueError(f"{folder} is used by a running server")
        cluster = PostgresServer(folder / "data", host=place.host, port=place.port, tls=place.has_tls)
        if cluster.is_new:
            cluster.create()
        elif cluster.log.exists() and cluster.log.stat().st_size > _MAX_LOG_BYTES:
            cluster.log.replace(cluster.log.with_suffix(".log.1"))
        logins = f"{DATABASE} {','.join(ROLES)} all scram-sha-256"
        if place.certificate is not None and place.key is not None:
            # Copies under PostgreSQL's file names, because the server's user cannot read root's key.
            pair = {"server.crt": place.certificate.read_bytes(), "server.key": place.key.read_bytes()}
            cluster.configure(SETTINGS | _TLS, hba=[f"hostssl {logins}"], files=pair)
        else:
            cluster.configure(SETTINGS, hba=[f"host {logins}"])
        try:
            cluster.start()
            _set_up(cluster, place)
            yield cluster
        finally:
            cluster.stop()
    finally:
        os.close(lock)


def administrators_sql() -> str:
    """Returns the SQL that a database administrator runs once: roles, tables, rights, and example logins."""
    logins = "".join(
        f"-- CREATE ROLE {name} LOGIN; GRANT {role} TO {name};  -- then: \\password {name}\n"
        for name, role in ROLES.items()
    )
    return f"{schema_sql()}\n-- Who logs in, for example:\n{logins}"


def _set_up(cluster: PostgresServer, place: TrialLocation) -> None:
    with psycopg.connect(cluster.admin_url, autocommit=True) as db:
        known = {name for (name,) in db.execute("SELECT rolname FROM pg_roles").fetchall()}
        for role in ROLES:
            name = sql.Identifier(role)
            if role not in known:
                db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
            # Hashed by the client, so that the server's log never contains the password.
            hashed = db.pgconn.encrypt_password(_password(place, role).encode(), role.encode(), b"scram-sha-256")
            db.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, sql.Literal(hashed.decode())))
        database = sql.Identifier(DATABASE)
        if db.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone() is None:
            db.execute(sql.SQL("CREATE DATABASE {}").format(database))
        db.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))
    with psycopg.connect(cluster.admin_url, dbname=DATABASE, autocommit=True) as db:
        make_schema(db)
        for role, rights in ROLES.items():
            names = [sql.Identifier(x) for x in (DATABASE, role, rights, role)]
            db.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}; GRANT {} TO {}").format(*names))


def _password(place: TrialLocation, role: str) -> str:
    """Returns a role's password from its file, generating it at first use."""
    path = place.passfile(role)
    if path.exists():
        return path.read_text().strip().rpartition(":")[2]
    password = secrets.token_urlsafe(32)
    replace_file(path, f"*:*:{DATABASE}:{role}:{password}\n".encode(), mode=0o600)
    return password
