"""A real PostgreSQL, killed and started again."""

import pathlib

import psycopg
import pytest

from launch.supervision import process_tree
from tests.postgres import Server, start_server

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(postgres: Server, data_folder: pathlib.Path):
    server = start_server(data_folder / "killed")  # `postgres` has seen that it can run here
    yield server
    server.close()


def runs(pid: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has reaped."""
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_killed_server_started_again_has_what_was_committed(server):
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute("CREATE TABLE kept (x int)")
        db.execute("INSERT INTO kept VALUES (7)")
        db.execute("BEGIN")
        db.execute("INSERT INTO kept VALUES (8)")
        processes = {server.cluster.pid} | process_tree.descendants(server.cluster.pid)
        server.kill()
        assert len(processes) > 3 and not any(map(runs, processes))
        with pytest.raises(psycopg.OperationalError):
            db.execute("COMMIT")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.url(), connect_timeout=5)
    server.restart()
    with psycopg.connect(server.url()) as db:
        assert db.execute("SELECT x FROM kept").fetchall() == [(7,)]


def test_database_of_a_test_is_empty_and_another_one_each_time(postgres, database):
    other = postgres.create_database()
    with psycopg.connect(database) as db, psycopg.connect(postgres.url(database=other)) as second:
        assert db.info.dbname != second.info.dbname
        tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        assert db.execute(tables).fetchone() == (0,)
    postgres.drop_database(other)


def test_server_is_durable(postgres):
    with psycopg.connect(postgres.url()) as db:
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert db.execute(f"SHOW {name}").fetchone() == ("on",)
