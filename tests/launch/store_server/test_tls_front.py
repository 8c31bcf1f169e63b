"""TLS before a real PostgreSQL, spoken to by the real client library and byte by byte."""

import hashlib
import pathlib
import random
import socket
import ssl
import struct

import psycopg
import pytest

from launch import certificates
from launch.store_server import tls_front
from tests.postgres import PASSWORD, Server, ServerTls, start_server

pytestmark = pytest.mark.heavy

SSL_REQUEST = struct.pack(">II", 8, 80877103)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tls")
    certificates.make(folder / "server", ["store.example"], days=1)
    certificates.make(folder / "other", ["store.example"], days=1)
    return folder


@pytest.fixture(scope="module")
def server(postgres: Server, data_folder: pathlib.Path, folder: pathlib.Path):
    files = ServerTls(certificate=folder / "server" / "server.pem", key=folder / "server" / "server.key")
    server = start_server(data_folder / "tls", tls=files)
    yield server
    server.close()


def url(server: Server, folder: pathlib.Path, *, authority: str = "server", **params: str) -> str:
    given = {"sslmode": "verify-full", "sslrootcert": str(folder / authority / "ca.pem")} | params
    return server.url(**given)


def dial(server: Server) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=30)


def test_client_that_verifies_the_server_is_served_over_tls(server, folder):
    with psycopg.connect(url(server, folder, hostaddr="127.0.0.1", host="store.example")) as db:
        assert db.pgconn.ssl_in_use
        assert db.execute("SELECT 1").fetchone() == (1,)


def test_large_messages_arrive_as_they_were_sent_in_both_directions(server, folder):
    sent = random.Random(0).randbytes(9_000_001)
    with psycopg.connect(url(server, folder)) as db:
        got = db.execute("SELECT %b::bytea, md5(%b)", (sent, sent), binary=True).fetchone()
    assert got == (sent, hashlib.md5(sent).hexdigest())


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"authority": "other"}, "certificate verify failed"),
        ({"host": "other.example", "hostaddr": "127.0.0.1"}, "does not match host name"),
        ({"sslmode": "disable"}, "encrypted connections only"),
        ({"password": "guessed"}, "password authentication failed"),
        ({"channel_binding": "require"}, "channel binding is required"),
    ],
)
def test_connection_that_is_not_as_it_should_be_is_refused(server, folder, params, why):
    with pytest.raises(psycopg.OperationalError, match=why):
        psycopg.connect(url(server, folder, **params))


def test_plain_bytes_behind_the_request_for_tls_are_not_taken_for_encrypted_ones(server):
    startup = struct.pack(">II", 8, 196608)
    with dial(server) as client:
        client.sendall(SSL_REQUEST + startup)
        assert client.recv(1) == b"S"
        # TLS takes them for a broken record: an alert or the end, never an answer of PostgreSQL's (R, E).
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer[:1] in (b"", b"\x15")


def test_garbage_and_silence_hold_nobody_up(server, folder):
    silent = [dial(server) for _ in range(20)]
    with dial(server) as client:
        client.sendall(random.Random(1).randbytes(4096))
        answer = client.recv(4096)
    assert answer[:1] == b"E" and b"encrypted connections only" in answer
    with psycopg.connect(url(server, folder)) as db:
        assert db.execute("SELECT 1").fetchone() == (1,)
    for client in silent:
        client.close()


def strangers(server: Server, num: int, first: bytes) -> list[socket.socket]:
    """Connections that say nothing after the handshake but `first`."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    found: list[socket.socket] = []
    for _ in range(num):
        plain = dial(server)
        plain.sendall(SSL_REQUEST)
        assert plain.recv(1) == b"S"
        found.append(context.wrap_socket(plain))
        if first:
            found[-1].sendall(first)
    return found


def startup_packet(**fields: str) -> bytes:
    said = struct.pack(">I", 196608) + b"".join(f"{k}\0{v}\0".encode() for k, v in fields.items()) + b"\0"
    return struct.pack(">I", len(said) + 4) + said


@pytest.mark.parametrize("first", [b"", startup_packet(user="postgres", database="postgres")], ids=["silent", "named"])
def test_clients_that_never_log_in_keep_nobody_out_and_cut_nobody_off(server, folder, monkeypatch, first):
    monkeypatch.setattr(tls_front, "_MAX_STRANGERS", 4)
    monkeypatch.setattr(tls_front, "_MAX_CONNECTIONS", 8)
    with psycopg.connect(url(server, folder), autocommit=True) as before:
        held = strangers(server, 30, first)
        for _ in range(3):
            with psycopg.connect(url(server, folder)) as db:
                assert db.execute("SELECT 1").fetchone() == (1,)
        assert before.execute("SELECT 2").fetchone() == (2,)  # who is in stays in
        # The oldest made room: their connections have ended.
        assert all(_ended(one) for one in held[:20])
        for one in held:
            one.close()


def _ended(client: socket.socket) -> bool:
    try:
        while client.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_client_that_says_nothing_is_cut_off_in_time(server, folder, monkeypatch):
    monkeypatch.setattr(tls_front, "_LOGIN_S", 0.2)
    (one,) = strangers(server, 1, b"")
    assert _ended(one)


@pytest.mark.parametrize("packet", [struct.pack(">I", 2**31), struct.pack(">I", 3), struct.pack(">I", 10_001)])
def test_startup_packet_of_an_impossible_size_is_refused_at_once(server, packet):
    (one,) = strangers(server, 1, packet)
    assert _ended(one)


def test_server_that_is_killed_and_started_again_is_reached_by_the_same_url(server, folder):
    with psycopg.connect(url(server, folder), autocommit=True) as db:
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            db.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url(server, folder))
    server.restart()
    with psycopg.connect(url(server, folder)) as db:
        assert db.execute("SELECT 1").fetchone() == (1,)


def test_password_of_the_tests_is_not_shown_by_an_error(server, folder):
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect(url(server, folder, dbname="no such database"))
    assert PASSWORD not in str(caught.value)
