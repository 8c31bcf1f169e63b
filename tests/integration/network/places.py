"""What a run across machines needs besides its processes: certificates, a token, and a store behind TLS."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from bridge import credentials
from bridge.store.open import SqlStore, open_store
from launch.tools.store_server import certificates, trial_store
from tests.integration.network.namespaces import Network
from tests.integration.support.processes import wait_until
from tests.postgres import need_tls

T = TypeVar("T")
STORE_PORT, SNAPSHOT_PORT = 5432, 8443


@dataclasses.dataclass(frozen=True)
class Places:
    """A network's store and secrets; made by `places`."""

    net: Network
    secrets: Path
    """What `launch.tools.make_certificates` wrote."""
    store: Path
    """The trial store's folder."""
    root: Path
    """A folder that also the user enters that PostgreSQL runs as."""

    @property
    def learner_env(self) -> Mapping[str, str]:
        """Of whoever leads."""
        own = {credentials.CERTIFICATE: certificates.CERTIFICATE, credentials.KEY: certificates.KEY}
        return self._shared("learner") | {name: str(self.secrets / file) for name, file in own.items()}

    @property
    def actor_env(self) -> Mapping[str, str]:
        """Of whoever serves."""
        return self._shared("actor")

    def store_url(self, side: str) -> str:
        """How a side (`learner`, `actor`) reaches the store."""
        address = self.net["store"].address
        return f"postgresql://{side}@{address}:{STORE_PORT}/{trial_store.DATABASE}?sslmode=verify-full"

    def ask_store(self, host: str, run: str, ask: Callable[[SqlStore], T]) -> T:
        """What the store answers to this process on a host, in the learner's role; `run` is the run's id."""

        def call() -> T:
            with contextlib.closing(open_store(self.store_url("learner"), run=run, retry_s=30.0)) as store:
                return ask(store)

        with _environment(self.learner_env):
            return self.net[host].call(call)

    def _shared(self, side: str) -> dict[str, str]:
        ca = str(self.secrets / certificates.CA)
        return {
            credentials.TOKEN_FILE: str(self.secrets / certificates.TOKEN),
            credentials.CA: ca,
            "PGSSLROOTCERT": ca,
            "PGPASSFILE": str(self.store / f"{side}.pgpass"),
        }


@contextlib.contextmanager
def places(net: Network) -> Generator[Places]:
    """Certificates and a running store on the host `store`, for the block's duration."""
    # PostgreSQL runs as an unprivileged user, which pytest's own folders keep out.
    root = Path(tempfile.mkdtemp(prefix="sluice-network-"))
    root.chmod(0o711)
    try:
        certificates.make(root / "secrets", [host.address for host in net.hosts.values()], days=1)
        made = Places(net, root / "secrets", root / "store", root)
        with store_server(made):
            yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def store_server(where: Places) -> Generator[subprocess.Popen[str]]:
    """`launch.tools.store_server` on the host `store`, ready, for the block's duration."""
    need_tls()
    host, log = where.net["store"], where.root / "store.log"
    with open(log, "w") as output:
        process = host.spawn(
            "launch.tools.store_server",
            f"--dir={where.store}",
            f"--listen={host.address}:{STORE_PORT}",
            f"--cert={where.secrets / certificates.CERTIFICATE}",
            f"--key={where.secrets / certificates.KEY}",
            output=output,
        )
    try:
        wait_until(lambda: process.poll() is not None or "serving at" in log.read_text(), "the store serves")
        if process.poll() is not None:
            pytest.fail(f"the store does not start: {log.read_text()}")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fill(folder: Path) -> Path:
    """Fills the file system of a folder; returns the file that does, to be removed."""
    stat = os.statvfs(folder)
    filler = folder / "filler"
    with open(filler, "wb") as f:
        os.posix_fallocate(f.fileno(), 0, stat.f_bavail * stat.f_frsize)
    return filler


@contextlib.contextmanager
def tmpfs(folder: Path, *, num_bytes: int) -> Generator[Path]:
    """A file system of so many bytes at `folder`, for the block's duration."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
