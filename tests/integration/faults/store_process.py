"""The campaign's store: a real PostgreSQL behind TLS that is killed and started again, and what it writes down."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
from typing import Any

import psycopg
from psycopg import sql

from launch.tools.store_server import certificates, trial_store
from tests.integration.network.places import STORE_PORT, Places

_RECORDER = pathlib.Path(__file__).with_name("recorder.sql")
_CONNECT_S = 5


class StoreProcess:
    """`launch.tools.store_server` on the host `store`."""

    def __init__(self, where: Places, log: pathlib.Path) -> None:
        """Not started."""
        self._where, self._log = where, log
        self._process: subprocess.Popen[str] | None = None
        self._begins = 0

    def start(self) -> None:
        """Starts it; `serves` says when it is there."""
        host = self._where.net["store"]
        with open(self._log, "a") as output:
            self._begins = output.tell()
            self._process = host.spawn(
                "launch.tools.store_server",
                f"--dir={self._where.store}",
                f"--listen={host.address}:{STORE_PORT}",
                f"--cert={self._where.secrets / certificates.CERTIFICATE}",
                f"--key={self._where.secrets / certificates.KEY}",
                output=output,
            )

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def serves(self) -> bool:
        """Whether it has said so since it was started."""
        return self.is_alive and "serving at" in self._log.read_text()[self._begins :]

    @property
    def pids(self) -> list[int]:
        """All that runs on its machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._where.net["store"].namespace], capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid()]

    def signal(self, number: signal.Signals) -> None:
        """To all its processes: as of a machine that loses power, or stands still."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """In order."""
        if self._process is not None and self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self._process.wait()

    def ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a superuser's statement, by the server's socket; OperationalError or OSError if it is away."""
        with self._connect() as db:
            return db.execute(sql.SQL(question), values).fetchall()  # pyright: ignore[reportArgumentType] a bench's own

    def record(self) -> None:
        """From here on the database writes down what becomes of its tables."""
        with self._connect() as db:
            db.execute(sql.SQL(_RECORDER.read_text()))  # pyright: ignore[reportArgumentType] a file of ours

    def _connect(self) -> "psycopg.Connection[Any]":
        lines = (self._where.store / "data" / "postmaster.pid").read_text().splitlines()
        port, sockets = lines[3], lines[4]
        return psycopg.connect(
            f"postgresql://postgres@/{trial_store.DATABASE}?host={sockets}&port={port}",
            autocommit=True,
            connect_timeout=_CONNECT_S,
        )


def with_store_at(where: Places, folder: pathlib.Path) -> Places:
    """The same machines, their store kept in a folder."""
    return dataclasses.replace(where, store=folder)
