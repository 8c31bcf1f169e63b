"""Tables and roles: made once, by whoever may; another format is refused."""

import contextlib
import sqlite3
import subprocess
import sys
import threading

import psycopg
import pytest

from bridge.store.open import create_run, open_store
from bridge.store.postgres.tables_and_roles import schema_sql
from bridge.store.sqlite_schema import CREATE
from tests.bridge.factories import make_ticket


def connect(url):
    return psycopg.connect(url, autocommit=True)


def url_as(url, user):
    return url.replace("//postgres@", f"//{user}@")


def test_database_without_a_store_says_what_to_do(database):
    with pytest.raises(ValueError, match="has no Sluice store yet: start the learner first"):
        open_store(database, run="r")


def test_format_of_another_build_refused(database):
    create_run(database, run="r", name="n", actor_role="sluice_actor")
    with connect(database) as db:
        db.execute("UPDATE sluice.format SET number = 99")
    with pytest.raises(ValueError, match="expected format 14, got 99"):
        open_store(database, run="r")
    with pytest.raises(ValueError, match="expected format 14, got 99"):
        create_run(database, run="r", name="n", actor_role="x")


def test_many_makers_at_once_make_one_store(database):
    threads = [
        threading.Thread(target=create_run, args=(database,), kwargs={"run": f"r{n}", "name": "n", "actor_role": "x"})
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with connect(database) as db:
        assert db.execute("SELECT count(*) FROM sluice.runs").fetchone() == (6,)


def test_role_that_may_not_make_tables_is_told_what_an_administrator_does(database, postgres):
    postgres.create_role("plain")
    url = url_as(database, "plain")
    with pytest.raises(
        ValueError, match="may not create the store.*postgres.tables_and_roles.*GRANT sluice_learner TO plain"
    ):
        create_run(url, run="r", name="n", actor_role="x")
    with connect(database) as db:
        db.execute(schema_sql().encode())
    with pytest.raises(ValueError, match="GRANT sluice_learner or sluice_actor TO plain"):
        create_run(url, run="r", name="n", actor_role="x")
    with connect(database) as db:
        db.execute("GRANT sluice_actor TO plain")
    with pytest.raises(ValueError, match="GRANT sluice_learner TO plain"):
        create_run(url, run="r", name="n", actor_role="x")
    with connect(database) as db:
        db.execute("GRANT sluice_learner TO plain")
    create_run(url, run="r", name="n", actor_role="x")
    with contextlib.closing(open_store(url, run="r")) as store:
        assert store.put_tickets([make_ticket("a")]) == 1


def test_role_that_may_make_roles_and_tables_but_is_no_superuser_makes_all_and_is_held_to_its_runs(database, postgres):
    """As on a managed server, where nobody is a superuser."""
    postgres.create_role("manager")
    with connect(database) as db:
        db.execute("ALTER ROLE manager CREATEROLE")
        db.execute(f"GRANT CREATE ON DATABASE {db.info.dbname} TO manager".encode())
        db.execute("GRANT sluice_learner, sluice_actor TO manager WITH ADMIN OPTION")  # another test may have made them
    url = url_as(database, "manager")
    create_run(url, run="r", name="n", actor_role="sluice_actor")
    with contextlib.closing(open_store(url, run="r")) as store:
        assert store.put_tickets([make_ticket("a")]) == 1
    create_run(database, run="other", name="n", actor_role="nobody")
    with connect(url) as db:  # though it owns the tables
        assert db.execute("SELECT run FROM sluice.runs").fetchall() == [("r",)]


@pytest.mark.heavy
def test_printed_sql_is_all_that_an_administrator_needs(database):
    printed = subprocess.run(
        [sys.executable, "-m", "bridge.store.postgres.tables_and_roles"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == schema_sql().strip()


def test_both_engines_have_the_same_columns(database, tmp_path):
    create_run(database, run="r", name="n", actor_role="x")
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as db:
        for statement in CREATE:
            db.execute(statement)
        tables = {n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        names = tables - {"meta", "changes"}  # PostgreSQL notifies of changes
        in_sqlite = {n: {row[1] for row in db.execute(f"PRAGMA table_info({n})")} for n in names}
    with connect(database) as db:
        names = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'sluice'"
        in_postgres = {}
        for table, column in db.execute(names).fetchall():
            in_postgres.setdefault(table, set()).add(column)
    del in_postgres["format"]
    in_postgres["runs"] -= {"name", "owner", "actor_role", "created_s"}
    assert in_sqlite == in_postgres
