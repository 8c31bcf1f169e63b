"""The proxy between machines: bytes arrive as they were sent; connections are cut, stalled and refused on demand."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.integration.network.namespaces import network
from tests.integration.network.proxy import Proxy, proxy
from tests.integration.support.processes import wait_until

PAYLOAD = bytes(range(256)) * 4096


@contextlib.contextmanager
def echo_server(address: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Sends back what it gets, each connection in a thread, until the block ends."""
    server = socket.create_server((address, 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while block := connection.recv(1 << 16):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)


@pytest.fixture
def through() -> Iterator[Proxy]:
    with echo_server() as target, proxy(target) as made:
        yield made


def received(client: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (block := client.recv(1 << 16)):
        data += block
    return data


def test_bytes_arrive_as_they_were_sent_and_are_counted(through: Proxy):
    with socket.create_connection(through.address, timeout=30) as client:
        sender = threading.Thread(target=client.sendall, args=(PAYLOAD,))
        sender.start()
        assert received(client, len(PAYLOAD)) == PAYLOAD
        sender.join()
    wait_until(lambda: through.num_bytes == len(PAYLOAD), "all is counted")
    assert through.num_connections == 1
    wait_until(lambda: through.num_open == 0, "both ends are closed")


def test_stalled_connection_stays_open_and_goes_on(through: Proxy):
    with socket.create_connection(through.address, timeout=30) as client:
        through.stall()
        client.sendall(b"later")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(10)
        through.flow()
        client.settimeout(30)
        assert received(client, 5) == b"later"


def test_cut_connection_is_reset_and_a_new_one_works_unless_refused(through: Proxy):
    with socket.create_connection(through.address, timeout=30) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        through.cut()
        with pytest.raises(ConnectionResetError):
            received(client, 1)
    with socket.create_connection(through.address, timeout=30) as client:
        client.sendall(b"y")
        assert client.recv(1) == b"y"
    through.refuses = True
    with pytest.raises(ConnectionResetError), socket.create_connection(through.address, timeout=30) as client:
        received(client, 1)


@pytest.mark.integration
def test_proxy_on_a_host_connects_from_there():
    with network(("a", "b")) as net:
        server = net["b"].call(lambda: socket.create_server((net["b"].address, 0)))
        with server, proxy(server.getsockname(), on=net["a"]) as made:
            client = net["a"].call(lambda: socket.create_connection(made.address, timeout=10))
            with client:
                connection, (address, _) = server.accept()
                with connection:
                    assert address == net["a"].address
