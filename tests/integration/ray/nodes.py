"""A Ray cluster of real nodes: one for each host of a network, with tokens, and what is run on it."""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.network.namespaces import Host, Network
from tests.integration.network.places import Places
from tests.integration.support.jobs import Job
from tests.integration.support.processes import kill, wait_until

RAY = "ray.scripts.scripts"
_PORT = 6379
_STORE_BYTES = 80_000_000


class Nodes:
    """The cluster; made by `nodes`."""

    def __init__(self, net: Network, names: Sequence[str], root: Path, env: Mapping[str, str]) -> None:
        """Starts nothing yet; the first name is the head's."""
        self._net, self._names, self._root = net, names, root
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            **env,
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}

    @property
    def head(self) -> Host:
        """Where drivers run."""
        return self._net[self._names[0]]

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.head.address}:{_PORT}"

    def start(self, name: str, *, num_cpus: int, cores: Collection[int]) -> None:
        """Starts a host's node; it and all it starts run on these cores."""
        host = self._net[name]
        way = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self._root}"]
            if host == self.head
            else [f"--address={self.address}"]
        )
        with open(self.log(name), "w") as output:
            self.processes[name] = host.spawn(
                RAY,
                "start",
                "--block",
                *way,
                f"--node-ip-address={host.address}",
                f"--num-cpus={num_cpus}",
                f"--object-store-memory={_STORE_BYTES}",
                env=self.env,
                output=output,
            )
        os.sched_setaffinity(self.processes[name].pid, cores)

        def there() -> bool:
            assert self.processes[name].poll() is None, self.log(name).read_text()
            return "Ray runtime started" in self.log(name).read_text()

        wait_until(there, f"Ray's node {name}", deadline_s=120.0)

    def log(self, name: str) -> Path:
        """What a node's `ray start` says."""
        return self._root / f"{name}.log"

    def status(self) -> str:
        """What `ray status` prints."""
        process = self.head.spawn(RAY, "status", f"--address={self.address}", env=self.env, output=subprocess.PIPE)
        return process.communicate(timeout=60)[0]

    def drive(self, where: Places, folder: Path, fields: Mapping[str, object], *flags: str) -> Job:
        """Runs `launch.ray` with the tiny preset on the head's host; it prints into `driver.log` beside `folder`."""
        own = {
            "run.dir": folder,
            "run.name": folder.name,
            "store.url": where.store_url("learner"),
            "publish.bucket": (folder.parent / "bucket").as_uri(),
        }
        with open(folder.parent / "driver.log", "w") as output:
            process = self.head.spawn(
                "launch.ray",
                f"--address={self.address}",
                "--config=tiny",
                f"--actor_store={where.store_url('actor')}",
                *flags,
                *(f"--config.{name}={value}" for name, value in {**own, **fields}.items()),
                env=self.env,
                output=output,
            )
        return Job(folder, process)

    def end(self) -> None:
        """Kills all nodes."""
        for process in self.processes.values():
            if process.poll() is None:
                kill(process)


@contextlib.contextmanager
def nodes(net: Network, names: Sequence[str], *, num_cpus: int, env: Mapping[str, str]) -> Generator[Nodes]:
    """A running cluster for the block's duration; its nodes have cores of their own, as far as there are enough.

    `names` are of hosts of `net`, whose removal ends what a node left; the first one's node is the head.
    """
    pytest.importorskip("ray", reason="Ray is not installed: bash launch/setup.sh +dev")
    root = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray has sockets there
    made = Nodes(net, names, root, env)
    try:
        cores = sorted(os.sched_getaffinity(0))
        for i, name in enumerate(names):
            made.start(name, num_cpus=num_cpus, cores=cores[i :: len(names)] or cores)
        yield made
    finally:
        made.end()
        shutil.rmtree(root, ignore_errors=True)


def pgpass_of_both(store: Path, into: Path) -> Path:
    """A file with the passwords of both roles: on a host that has learner and actors."""
    into.write_text("".join((store / f"{side}.pgpass").read_text() for side in ("learner", "actor")))
    into.chmod(0o600)
    return into
