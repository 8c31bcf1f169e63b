"""The store of runs whose processes are on many machines: a PostgreSQL database."""

from bridge import codec
from bridge.store.postgres import schema
from bridge.store.postgres.database import PostgresDatabase
from bridge.store.sql.store import SqlStore


class PostgresStore(SqlStore):
    """One run of a database; safe to use from several threads, closed before a fork."""

    def __init__(self, url: str, *, run: str, retry_s: float = 600.0, max_message_bytes: int = codec.MAX_BYTES) -> None:
        """Opens a run that is there (`make_run`).

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
            database.insist(schema.check_schema)
            if not database.insist(lambda db: schema.find_runs(db, run)):
                raise ValueError(f"the store has no run {run}, or this role may not serve it")
        except BaseException:
            database.close()
            raise


def make_run(url: str, *, run: str, name: str, actor_role: str, retry_s: float = 600.0) -> None:
    """Makes the run, and the tables where there are none; what is there stays.

    Raises:
      ValueError: the server refuses us, or this role may not.
      StoreLostError: it could not be reached.
    """
    database = PostgresDatabase(url, retry_s=retry_s)
    try:
        database.insist(schema.make_schema)
        database.insist(lambda db: schema.make_run(db, run, name=name, actor_role=actor_role))
    finally:
        database.close()


def find_runs(url: str, name_or_id: str, *, retry_s: float = 600.0) -> list[schema.FoundRun]:
    """The runs of that name or id that the URL's role may serve or lead, the newest first.

    Raises:
      ValueError: the server refuses us, or has no store.
      StoreLostError: it could not be reached.
    """
    database = PostgresDatabase(url, retry_s=retry_s)
    try:
        database.insist(schema.check_schema)
        return database.insist(lambda db: schema.find_runs(db, name_or_id))
    finally:
        database.close()
