"""A store of its own for a trial: a PostgreSQL with a database, the two roles, their passwords, and TLS."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import secrets
from collections.abc import Iterator

import psycopg
from psycopg import sql

from bridge.files import try_flock
from bridge.store.postgres.tables_and_roles import ACTOR, LEARNER, make_schema, schema_sql
from bridge.validation import is_loopback
from launch.tools.store_server.certificates import write_private
from launch.tools.store_server.postgres_server import PostgresServer

DATABASE = "sluice"
ROLES = {"learner": LEARNER, "actor": ACTOR}
"""Who logs in -> the role whose rights they have."""
_MAX_LOG_BYTES = 16 * 2**20

SETTINGS: dict[str, str | int] = {
    "max_connections": 500,  # two for each actor (docs/deploy.md)
    "timezone": "UTC",
    "authentication_timeout": "10s",
    # A client that was stopped, or cut off, inside a transaction holds nobody up for longer.
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
    """Where a trial store is kept, and where it is reached."""

    folder: pathlib.Path
    host: str
    port: int
    advertise: str
    """The name or address that others dial."""
    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None

    def __post_init__(self) -> None:
        """Refuses what would show passwords or groups to others."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("--cert and --key go together")
        for file in (self.certificate, self.key):
            if file is not None and not os.access(file, os.R_OK):
                raise ValueError(f"{file} can't be read; --cert and --key name PEM files")
        if not self.has_tls and not is_loopback(self.host):
            raise ValueError(
                f"--listen={self.host} is reached by other machines, and nothing would be encrypted: give --cert and "
                "--key (python -m launch.tools.make_certificates makes some for a trial), or listen at 127.0.0.1"
            )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted, all of them."""
        return self.certificate is not None

    def url(self, role: str) -> str:
        """What `store.url` is for a role; its password is in `passfile`."""
        host = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return (
            f"postgresql://{role}@{host}:{self.port}/{DATABASE}?sslmode={'verify-full' if self.has_tls else 'disable'}"
        )

    def passfile(self, role: str) -> pathlib.Path:
        """The file that PGPASSFILE names for a role."""
        return self.folder / f"{role}.pgpass"

    def describe(self) -> str:
        """What either side sets, as lines of a shell."""
        lines: list[str] = []
        for role, flag in (("learner", "--config.store.url"), ("actor", "--store")):
            lines += [f"# {role}", f"export PGPASSFILE={self.passfile(role)}", f"{flag}='{self.url(role)}'", ""]
        if self.has_tls:
            lines.append("# both: PGSSLROOTCERT=FILE names the authority of the server's certificate (ca.pem)")
        return "\n".join(lines).rstrip()


@contextlib.contextmanager
def serving(place: TrialLocation) -> Iterator[PostgresServer]:
    """The server of a place, as long as the context lasts; made the first time, later started on what is there.

    Raises:
      ValueError: another one serves this folder, or it can't be made or started.
    """
    folder = place.folder
    folder.mkdir(parents=True, exist_ok=True)
    # The user that root's server runs as goes through it; the files in it have modes of their own.
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_flock(lock, fcntl.LOCK_EX):
            raise ValueError(f"a server runs in {folder} already")
        cluster = PostgresServer(folder / "data", host=place.host, port=place.port, tls=place.has_tls)
        if cluster.is_new:
            cluster.create()
        elif cluster.log.exists() and cluster.log.stat().st_size > _MAX_LOG_BYTES:
            cluster.log.replace(cluster.log.with_suffix(".log.1"))
        logins = f"{DATABASE} {','.join(ROLES)} all scram-sha-256"
        if place.certificate is not None and place.key is not None:
            # Copies, by the names that PostgreSQL looks for: a key that root keeps can't be read by the server's user.
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
    """What an administrator of a database runs once in it: roles, tables, rights; who logs in is theirs to say."""
    logins = "".join(
        f"-- CREATE ROLE {name} LOGIN; GRANT {role} TO {name};  -- then: \\password {name}\n"
        for name, role in ROLES.items()
    )
    return f"{schema_sql()}\n-- Who logs in, for example:\n{logins}"


def _set_up(cluster: PostgresServer, place: TrialLocation) -> None:
    """Makes the roles, the database and its tables, or brings them to what they should be."""
    with psycopg.connect(cluster.admin_url, autocommit=True) as db:
        known = {name for (name,) in db.execute("SELECT rolname FROM pg_roles").fetchall()}
        for role in ROLES:
            name = sql.Identifier(role)
            if role not in known:
                db.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
            # Hashed here, so that the server's log can't have it.
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
    """A role's password, out of its file; made the first time."""
    path = place.passfile(role)
    if path.exists():
        return path.read_text().strip().rpartition(":")[2]
    password = secrets.token_urlsafe(32)
    write_private(path, f"*:*:{DATABASE}:{role}:{password}\n".encode())
    return password
