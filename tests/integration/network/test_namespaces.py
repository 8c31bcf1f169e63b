"""The network of the tests itself: what a cut and a kill leave."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.network.namespaces import Host, Network, network, sweep
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
