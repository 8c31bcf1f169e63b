"""Machines on one machine: network namespaces, each pair joined by a link of its own that can be slow and be cut.

The links are bridges in a namespace between the hosts. A cut takes a bridge down: both hosts' interfaces stay up and
what they send is lost without a word, as behind a broken switch. A host has one address (on its loopback), reached over
whichever link leads there, so a cut leg has no way round. `tc tbf` bounds each direction of each link.

Shared memory is each host's own too, or its actors would share downloads with those of another. Names carry the test's
pid: what a killed test left behind goes when the next network is made. `unavailable` says what is missing.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import pytest

from tests.integration.support.processes import REPO

T = TypeVar("T")
HOSTS = ("learner", "store", "actors")
RATE_BYTES_PER_S = 100_000_000
_BURST_BYTES = 512 * 1024
_LEAST_BURST_BYTES = 16 * 1024
_PREFIX = "sluice-test"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-\d+-\S+")
_CLONE_NEWNET = 0x40000000
_NAMESPACES, _SHM, _FILES = Path("/run/netns"), Path("/dev/shm"), Path("/etc/netns")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine of the network."""

    name: str
    namespace: str
    address: str

    @property
    def shm(self) -> Path:
        """The folder that its processes see as /dev/shm."""
        return _SHM / self.namespace

    def command(self, *arguments: object) -> list[str]:
        """A command line that runs another one on this host; the process keeps its id."""
        return ["ip", "netns", "exec", self.namespace, *map(str, arguments)]

    def spawn(
        self,
        module: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        output: int | IO[str] | None = None,
        shm: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Runs `python -m module arguments` on this host from the repository's root.

        Its shared memory is the host's, or `shm` (`ip netns exec` gives each process mounts of its own).
        """
        own = ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', shm or self.shm)
        return subprocess.Popen(
            self.command(*own, sys.executable, "-m", module, *arguments),
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": str(REPO)} | dict(env or {}),
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            text=True,
        )

    def enter(self) -> None:
        """Moves the calling thread to this host: sockets that it makes from here on are the host's."""
        with open(_NAMESPACES / self.namespace) as f:
            if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.namespace}")

    def call(self, function: Callable[[], T]) -> T:
        """A function's result, called in a thread of this process on this host."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.enter()
                results.append(function())
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


class Network:
    """Hosts and the links between them; made and removed by `network`."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Only names; nothing is made yet."""
        mark = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.hub = f"{mark}-hub"
        self.hosts = {name: Host(name, f"{mark}-{name}", f"10.77.0.{i}") for i, name in enumerate(hosts, start=1)}
        self._bridges = {frozenset(leg): f"br{i}" for i, leg in enumerate(itertools.combinations(hosts, 2))}

    def __getitem__(self, name: str) -> Host:
        """A host, by its name."""
        return self.hosts[name]

    def make(self, *, rate_bytes_per_s: int) -> None:
        """Makes namespaces, links and routes."""
        _run("ip", "netns", "add", self.hub)
        for host in self.hosts.values():
            _run("ip", "netns", "add", host.namespace)
            host.shm.mkdir()
            host.shm.chmod(0o1777)  # for whatever user runs there
            own = _FILES / host.namespace
            own.mkdir(parents=True)  # `ip netns exec` puts what is there in the place of /etc's
            # A machine's own name leads to its address, not to a loopback that others can't reach.
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/32", "dev", "lo")
        for leg, bridge in self._bridges.items():
            _run("ip", "-n", self.hub, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", self.hub, "link", "set", bridge, "up")
            for name in leg:
                (other,) = leg - {name}
                self._join(bridge, self[name], self[other], rate_bytes_per_s)

    def cut(self, one: str, other: str) -> None:
        """From here on nothing that one of the two sends reaches the other."""
        _run("ip", "-n", self.hub, "link", "set", self._bridges[frozenset((one, other))], "down")

    def heal(self, one: str, other: str) -> None:
        """Undoes `cut`."""
        _run("ip", "-n", self.hub, "link", "set", self._bridges[frozenset((one, other))], "up")

    def limit(self, one: str, other: str, *, rate_bytes_per_s: int = RATE_BYTES_PER_S) -> None:
        """From here on what the two send each other goes at this rate, each way."""
        for name, peer in ((one, other), (other, one)):
            at = ("-n", self[name].namespace, "qdisc", "change", "dev", f"to-{peer}", "root", "tbf")
            # A burst at once would be all that a tiny model's weights are.
            _run("tc", *at, *_rate(rate_bytes_per_s, min(_BURST_BYTES, max(_LEAST_BURST_BYTES, rate_bytes_per_s // 4))))

    @contextlib.contextmanager
    def partition(self, one: str, other: str) -> Generator[None]:
        """Cut within the block, healed after it."""
        self.cut(one, other)
        try:
            yield
        finally:
            self.heal(one, other)

    def remove(self) -> None:
        """Kills what runs on the hosts and removes everything."""
        for namespace in (*(h.namespace for h in self.hosts.values()), self.hub):
            _remove(namespace)

    def _join(self, bridge: str, host: Host, other: Host, rate_bytes_per_s: int) -> None:
        """One end of a leg: a pair of interfaces, bounded both ways, and the route to the other host."""
        inner, outer = f"to-{other.name}", f"{bridge}-{host.name}"
        pair = ("link", "add", inner, "netns", host.namespace, "type", "veth", "peer", "name", outer)
        _run("ip", *pair, "netns", self.hub)
        _run("ip", "-n", self.hub, "link", "set", outer, "master", bridge, "up")
        _run("ip", "-n", host.namespace, "link", "set", inner, "up")
        route = ("route", "add", f"{other.address}/32", "dev", inner, "src", host.address)
        _run("ip", "-n", host.namespace, *route)
        at = ("-n", host.namespace, "qdisc", "add", "dev", inner, "root", "tbf")
        _run("tc", *at, *_rate(rate_bytes_per_s))


@contextlib.contextmanager
def network(hosts: Sequence[str] = HOSTS, *, rate_bytes_per_s: int = RATE_BYTES_PER_S) -> Generator[Network]:
    """A network, its legs of this rate each way, for the block's duration; skips the test where none can be made."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    sweep()
    made = Network(hosts)
    try:
        made.make(rate_bytes_per_s=rate_bytes_per_s)
        yield made
    finally:
        made.remove()


@functools.cache
def unavailable() -> str | None:
    """Why no network can be made here; None if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"network: {' and '.join(missing)} not found (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network: namespaces need root"
    trial = Network(("a", "b"))
    try:
        trial.make(rate_bytes_per_s=RATE_BYTES_PER_S)
    except subprocess.CalledProcessError as e:
        return f"network: {' '.join(e.cmd)}: {e.stderr.strip()}"
    finally:
        trial.remove()
    return None


def sweep() -> None:
    """Removes what tests left that are dead now."""
    for path in (*_NAMESPACES.glob(f"{_PREFIX}-*"), *_SHM.glob(f"{_PREFIX}-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    """Kills a namespace's processes and takes its name and memory away; with its last process go its interfaces."""
    shutil.rmtree(_SHM / namespace, ignore_errors=True)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
    if not (_NAMESPACES / namespace).exists():
        return
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in map(int, listed.stdout.split()):
        # A thread of this very process may have entered it.
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _rate(bytes_per_s: int, burst_bytes: int = _BURST_BYTES) -> tuple[str, ...]:
    return ("rate", f"{bytes_per_s * 8}bit", "burst", str(burst_bytes), "latency", "100ms")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
