"""The network of the tests itself: who reaches whom, how fast, and what a cut and a kill leave."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration.network.namespaces import HOSTS, Host, Network, network, sweep
from tests.integration.support.processes import REPO, kill, wait_until

pytestmark = pytest.mark.integration
PORT = 7000


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@contextlib.contextmanager
def listening(host: Host) -> Iterator[socket.socket]:
    with host.call(lambda: socket.create_server((host.address, PORT))) as server:
        server.settimeout(10)
        yield server


def connect(host: Host, to: Host, *, timeout_s: float = 5.0) -> socket.socket:
    return host.call(lambda: socket.create_connection((to.address, PORT), timeout=timeout_s))


def test_every_host_reaches_every_other_and_this_machine_reaches_none(net: Network):
    for to in HOSTS:
        with listening(net[to]) as server:
            for name in HOSTS:
                with connect(net[name], net[to]):
                    connection, (address, _) = server.accept()
                    connection.close()
                    assert address == net[name].address
            # What that address is to this machine itself is not ours to say: some answer for every one.
            with contextlib.suppress(OSError), socket.create_connection((net[to].address, PORT), timeout=0.2):
                pass
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_cut_leg_loses_what_is_sent_without_a_word_and_a_healed_one_goes_on(net: Network):
    with listening(net["store"]) as server, connect(net["learner"], net["store"]) as client:
        peer, _ = server.accept()
        with peer, connect(net["actors"], net["store"]) as other:
            bystander, _ = server.accept()
            with bystander:
                with net.partition("learner", "store"):
                    client.sendall(b"held up")  # into the socket's buffer: nobody is told
                    peer.settimeout(0.5)
                    with pytest.raises(TimeoutError):
                        peer.recv(100)
                    with pytest.raises(TimeoutError):
                        connect(net["learner"], net["store"], timeout_s=0.3)
                    other.sendall(b"unharmed")
                    assert bystander.recv(100) == b"unharmed"
                peer.settimeout(30)
                assert peer.recv(100) == b"held up"


def test_link_carries_about_what_its_bound_says(net: Network):
    # Against the same bytes through a network without a narrow link, not against a clock of its own.
    num_bytes = 24_000_000
    with network(("learner", "store"), rate_bytes_per_s=20_000_000) as slow:
        seconds = {name: seconds_to_send(n, num_bytes) for name, n in (("100", net), ("20", slow))}
    ratio = seconds["20"] / seconds["100"]
    assert 3.0 < ratio < 7.0, seconds


def seconds_to_send(net: Network, num_bytes: int) -> float:
    with listening(net["store"]) as server, connect(net["learner"], net["store"]) as client:
        peer, _ = server.accept()
        with peer:
            sender = threading.Thread(target=client.sendall, args=(bytes(num_bytes),))
            start = time.perf_counter()
            sender.start()
            left = num_bytes
            while left:
                left -= len(peer.recv(1 << 20))
            sender.join()
            return time.perf_counter() - start


def test_killed_test_leaves_a_network_that_the_next_one_removes():
    with network(("a", "b")):  # skips where there is none
        pass
    code = (
        "import subprocess, sys, time\n"
        "from tests.integration.network.namespaces import network\n"
        "with network(('a', 'b')) as n:\n"
        "    sleeper = subprocess.Popen(n['a'].command('sleep', '1000'))\n"
        "    print(n['a'].namespace, sleeper.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    namespace, sleeper = process.stdout.readline().split()
    kill(process)
    assert namespace in namespaces()
    sweep()
    assert namespace not in namespaces()
    wait_until(lambda: not os.path.exists(f"/proc/{sleeper}"), "the end of what ran there")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
