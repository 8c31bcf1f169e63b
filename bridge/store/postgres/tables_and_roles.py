"""Tables of a PostgreSQL store, its two roles and their permissions.

`python -m bridge.store.postgres.tables_and_roles` prints the SQL, for an administrator who creates them by hand.
"""

import dataclasses
import pathlib

import psycopg
from psycopg import sql

from bridge import codec
from bridge.files import first_line

LEARNER, ACTOR = "sluice_learner", "sluice_actor"
_FOLDER = pathlib.Path(__file__).parent
_MAKER_LOCK = 0x534C5543  # held while the schema is created; an arbitrary number


def schema_sql() -> str:
    """Returns the complete SQL: roles, tables and grants."""
    texts = [(_FOLDER / name).read_text(encoding="utf-8") for name in ("roles.sql", "schema.sql", "grants.sql")]
    return "\n".join((*texts, f"INSERT INTO sluice.format VALUES ({codec.FORMAT});\n"))


def read_format(db: psycopg.Connection) -> int | None:
    """Returns the format number of the existing store; None if there is no store.

    Raises ValueError if this role may not read it, or the schema `sluice` is not a Sluice store.
    """
    if _one(db, "SELECT 1 FROM pg_namespace WHERE nspname = 'sluice'") is None:
        return None
    try:
        return _one(db, "SELECT number FROM sluice.format")
    except psycopg.errors.InsufficientPrivilege:
        raise ValueError(
            f"role {db.info.user} may not use the store in database {db.info.dbname}: have an administrator GRANT "
            f"{LEARNER} or {ACTOR} TO {db.info.user}"
        ) from None
    except psycopg.errors.UndefinedTable:
        raise ValueError(
            f"the schema sluice in database {db.info.dbname} is not a Sluice store; use another database"
        ) from None


def check_schema(db: psycopg.Connection) -> None:
    """Raises ValueError if the tables of this build's format do not exist or this role may not use them."""
    number = read_format(db)
    if number is None:
        raise ValueError(
            f"database {db.info.dbname} has no Sluice store yet: start the learner first, or have an administrator "
            "run what `python -m bridge.store.postgres.tables_and_roles` prints"
        )
    if number != codec.FORMAT:
        raise codec.OtherFormatError.of(f"the store in database {db.info.dbname}", number)


def make_schema(db: psycopg.Connection) -> None:
    """Creates roles and tables if missing; one process at a time. `db` must be in autocommit mode.

    Raises ValueError if this role lacks the permission, or the existing store has another format.
    """
    if read_format(db) is not None:
        check_schema(db)  # without the lock, which any role of the database could hold indefinitely
        return
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKER_LOCK,))
        if read_format(db) is None:
            try:
                db.execute(sql.SQL(schema_sql()))  # pyright: ignore[reportArgumentType] a file of ours
            except psycopg.errors.InsufficientPrivilege as e:
                raise ValueError(
                    f"role {db.info.user} may not create the store's tables in database {db.info.dbname} "
                    f"({first_line(e)}): have an administrator run what "
                    f"`python -m bridge.store.postgres.tables_and_roles` "
                    f"prints, and then GRANT {LEARNER} TO {db.info.user}"
                ) from e
    check_schema(db)


def make_run(db: psycopg.Connection, run: str, *, name: str, actor_role: str) -> None:
    """Creates a run owned by this role, unless it exists. In both cases `actor_role` becomes the role that serves it.

    Raises ValueError if another role owns the run, or this role may not create runs.
    """
    try:
        db.execute(
            """INSERT INTO sluice.runs (run, name, actor_role) VALUES (%s, %s, %s) ON CONFLICT (run) DO NOTHING""",
            (run, name, actor_role),
        )
        db.execute(
            "INSERT INTO sluice.serving (run) SELECT run FROM sluice.runs WHERE run = %s ON CONFLICT DO NOTHING", (run,)
        )
        is_mine = _one(db, "SELECT sluice.owns(%s)", run)
    except psycopg.errors.InsufficientPrivilege as e:
        raise ValueError(
            f"role {db.info.user} may not own runs ({first_line(e)}): have an administrator GRANT {LEARNER} TO "
            f"{db.info.user}"
        ) from e
    if not is_mine:
        raise ValueError(
            f"run {run} belongs to another role: connect as the role that started it, or start another run"
        )
    db.execute(
        "UPDATE sluice.runs SET actor_role = %s WHERE run = %s AND actor_role <> %s", (actor_role, run, actor_role)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRun:
    """Run found by name or id."""

    run: str
    finished_step: int | None
    """Step of the last weights; None while the run is in progress."""


def find_runs(db: psycopg.Connection, name_or_id: str) -> list[FoundRun]:
    """Returns the runs with that name or id that this database role may access as actor or learner, newest first."""
    found = "SELECT run, finished_step FROM sluice.runs WHERE run = %s OR name = %s ORDER BY created_s DESC, run"
    return [FoundRun(run, step) for run, step in db.execute(found, (name_or_id, name_or_id)).fetchall()]


def name_runs(db: psycopg.Connection) -> list[tuple[str, str]]:
    """Returns ids and names of the runs that this role may lead, newest first."""
    found = "SELECT run, name FROM sluice.runs WHERE sluice.has_role(owner) ORDER BY created_s DESC, run"
    return [(run, name) for run, name in db.execute(found).fetchall()]


def check_learner(db: psycopg.Connection) -> None:
    """Raises ValueError if this role may not lead runs."""
    if not _one(db, "SELECT pg_has_role(current_user, %s, 'MEMBER')", LEARNER):
        raise ValueError(
            f"role {db.info.user} may not manage runs: have an administrator GRANT {LEARNER} TO {db.info.user}"
        )


def _one(db: psycopg.Connection, query: str, *params: object):
    row = db.execute(sql.SQL(query), params).fetchone()  # pyright: ignore[reportArgumentType] texts of ours
    return None if row is None else row[0]


if __name__ == "__main__":
    print(schema_sql())
