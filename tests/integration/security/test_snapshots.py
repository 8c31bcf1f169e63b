"""Attacks on snapshots that cross a network: who may read them, and which of them an actor believes."""

import contextlib
import dataclasses
import http.client
import http.server
import socket
import ssl
import threading
from typing import ClassVar

import pytest
import trustme

from bridge.credentials import Tls
from bridge.object_store import open_source
from bridge.snapshots.snapshot_format import MANIFEST, HostFiles, SnapshotError, sign
from bridge.store.postgres.connections import Connections
from launch.services.snapshot_server import ServerProcess
from tests.integration.security.rig import (
    OTHER_TOKEN,
    SECRET,
    TOKEN,
    certificate,
    environment,
    fetch,
    fetcher,
    serving,
)
from tests.integration.support.processes import wait_until

pytestmark = pytest.mark.integration


WRONG_HEADERS = [
    None,
    "",
    "Bearer ",
    f"Bearer {SECRET}",  # the token itself never travels
    f"Bearer {SECRET[:-1]}",
    OTHER_TOKEN.header,
    TOKEN.header.lower(),
    TOKEN.header.replace("Bearer", "Basic"),
]


def test_wrong_or_missing_token_refused(tmp_path):
    """Wrong or missing token | 401 for whatever is asked, and no word of what is there"""
    with serving(tmp_path) as place:
        assert [place.ask(header=header) for header in WRONG_HEADERS] == [(401, b"")] * len(WRONG_HEADERS)
        assert place.ask("/v1/other/0:3/slot-0") == (401, b"")
        assert place.log.read_text().count("token refused address=127.0.0.1") == len(WRONG_HEADERS) + 1
        place.check_unharmed()


def test_actor_with_another_token_refused_by_its_own_check_before_it_asks(unharmed, tmp_path):
    """An actor with another run's token | it refuses the manifest itself, before a byte is asked for"""
    with pytest.raises(SnapshotError, match="not signed with this actor's token; learner and actors need the same"):
        fetch(fetcher(unharmed.trust, token=OTHER_TOKEN), unharmed.announcement(), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_many_failed_tokens_refused_before_they_are_compared(tmp_path):
    """Guessing tokens | after ten failures an address may try once a second, and is answered 429 else"""
    with serving(tmp_path) as place:
        statuses = [place.ask(header=f"Bearer {i:064d}")[0] for i in range(30)]
        assert statuses[:10] == [401] * 10 and statuses.count(429) >= 15
        wait_until(lambda: place.ask(header=TOKEN.header)[0] == 200, "the right token is let in again")
        place.check_unharmed()


@pytest.mark.parametrize(
    ("listen", "scheme", "token", "said"),
    [
        ("0.0.0.0:0", "http", SECRET, "serve snapshots by https, and with a token"),
        ("0.0.0.0:0", "https", None, "serve snapshots by https, and with a token"),
        ("[::]:0", "http", SECRET, "serve snapshots by https, and with a token"),
        ("127.0.0.1:0", "https", SECRET, "https needs a certificate and its key"),
        ("127.0.0.1:0", "https", "short", "a token must be 32 or more printable ASCII characters"),
    ],
    ids=["http", "no token", "http, IPv6", "no certificate", "short token"],
)
def test_server_off_loopback_without_tls_or_token_does_not_start(tmp_path, listen, scheme, token, said):
    """No TLS or no token off loopback | the server does not start, and says what is missing"""
    with environment(token, None), pytest.raises(ValueError, match=said):
        ServerProcess(tmp_path, listen=listen, scheme=scheme, reader_grace_s=5.0, log=tmp_path / "log")
    assert not token or token == "short" or token not in (tmp_path / "log").read_text()


def test_actor_shows_its_token_to_no_plain_server_of_another_machine(tmp_path):
    """An announced source by plain http on another machine | refused before anything is sent"""
    with pytest.raises(ValueError, match="http is allowed only on loopback; serve snapshots by https"):
        open_source("http://192.0.2.1:8080/v1", token=TOKEN)


@pytest.mark.parametrize("query", ["", "?sslmode=disable", "?sslmode=prefer", "?sslmode=require", "?sslmode=verify-ca"])
def test_store_off_loopback_without_proof_of_its_server_refused(query, monkeypatch):
    """A PostgreSQL URL of another machine without sslmode=verify-full | refused before anything is sent"""
    monkeypatch.delenv("PGSSLMODE", raising=False)
    for host in ("store.example", "192.0.2.1", "127.0.0.1,store.example"):
        with pytest.raises(ValueError, match=r"is on another machine.*add \?sslmode=verify-full"):
            Connections(f"postgresql://actor:hunter2@{host}/db{query}")
    Connections("postgresql://actor@127.0.0.1/db")
    Connections("postgresql://actor@store.example/db?sslmode=verify-full")
    monkeypatch.setenv("PGHOST", "store.example")
    with pytest.raises(ValueError, match="another machine"):
        Connections("postgresql:///db")


@pytest.mark.parametrize("what", ["expired", "foreign", "other host"])
def test_certificate_that_proves_nothing_refused(tmp_path, what):
    """An expired or foreign certificate, or one of another host | the actor refuses; the token is not sent"""
    authority = trustme.CA()
    shown = certificate(
        tmp_path / "tls",
        authority=trustme.CA() if what == "foreign" else authority,
        host="192.0.2.1" if what == "other host" else "127.0.0.1",
        days=-1 if what == "expired" else 1,
    )[0]
    trust = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trust)
    said = {"expired": "Expired", "foreign": "UnknownIssuer", "other host": "NotValidForName"}[what]
    with serving(tmp_path / "served", tls=(shown, Tls(ca=trust))) as place:
        with pytest.raises(SnapshotError, match=f"its certificate is refused: {said}"):
            fetch(fetcher(Tls(ca=trust)), place.announcement(), tmp_path / "copy")
        with pytest.raises(ssl.SSLCertVerificationError):  # another client's word on it
            place.ask(header=TOKEN.header)
        assert "token refused" not in place.log.read_text()


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Sends a reader elsewhere, and remembers what it showed."""

    to = ""
    shown: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.shown.append(self.headers.get("Authorization"))
        self.send_response(302 if self.to else 404)
        self.send_header("Location", self.to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_source_that_redirects_elsewhere_is_not_followed_with_the_token(unharmed, tmp_path, scheme):
    """A source redirects to another server, plain or encrypted | the credential does not go there; refused"""
    shown, trust = certificate(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(shown.certificate), shown.key)
    there = type("There", (Redirecting,), {"shown": []})
    with contextlib.ExitStack() as ending:

        def serve(handler: type[Redirecting], *, tls: bool) -> str:
            server = ending.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            if tls:
                server.socket = context.wrap_socket(server.socket, server_side=True)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ending.callback(server.shutdown)
            return f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/v1"

        here = type("Here", (Redirecting,), {"shown": [], "to": serve(there, tls=scheme == "https")})
        announced = sign(dataclasses.replace(unharmed.announcement(), sources=(serve(here, tls=True),)), TOKEN)
        with pytest.raises(SnapshotError):
            fetch(fetcher(trust), announced, tmp_path / "copy")
    assert TOKEN.header in here.shown and set(there.shown) <= {None}


HOSTILE_PATHS = [
    "/v1/run-1/0:3/../../../etc/passwd",
    "/v1/run-1/0:3/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/run-1/0:3/..%2f..%2flog",
    "/v1/run-1/0:3//etc/passwd",
    f"/v1/run-1/0:3/{MANIFEST}",
    f"/v1/run-1/0:3/{HostFiles().writer}",
    "/v1/run-1/0:3/slot-1",
    "/v1/run-1/0:3/slot-0%00",
    "/v1/run-2/0:3/slot-0",
    "/v1/run-1/0:2/slot-0",
    "/v1/run-1/0:4/slot-0",
    "/v1/run-1/9999999999999999999999:3/slot-0",
    "/v1/run-1/x/slot-0",
    "/v1",
    "/",
]


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_reader_that_asks_for_another_file_gets_none(unharmed, path):
    """A reader with the token asks for any other file (..., /etc/passwd, the slot being written) | 404 or 410"""
    status, body = unharmed.ask(path, header=TOKEN.header)
    assert status in (404, 410) and body in (b"", b"404: Not Found")


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=0-99999999999"},
        {"Range": "bytes=99999999999-"},
        {"Range": "bytes=-0"},
        {"Range": "bytes=5-1"},
        {"Range": "bytes=" + "0-1," * 900 + "0-1"},
        {"X": "x" * 5000},
        {f"X{i}": "x" for i in range(200)},
        {"Content-Length": "999999999999"},
        {"Transfer-Encoding": "chunked"},
    ],
    ids=[
        "too far",
        "behind",
        "none",
        "backwards",
        "many ranges",
        "long header",
        "many headers",
        "body",
        "chunked body",
    ],
)
def test_oversized_or_odd_request_refused(unharmed, headers):
    """An oversized or odd request, with the token | an error or the file's own bytes; the server serves on"""
    try:
        status, body = unharmed.ask(header=TOKEN.header, headers=headers)
    except http.client.RemoteDisconnected:  # closed without a word
        pass
    else:
        assert status in (206, 400, 416, 431) and len(body) <= unharmed.manifest.shards[0].file.num_bytes
    assert unharmed.server.returncode is None


def test_bytes_that_are_no_request_refused(unharmed):
    """Bytes that are no TLS, or no HTTP | the connection is closed; the server serves on"""
    host, _, port = unharmed.url.partition("//")[2].rpartition(":")
    trust = ssl.create_default_context(cafile=str(unharmed.trust.ca))
    for data in (b"\x80\x05." * 100, b"\x00" * 70_000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 200):
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            send_all(plain, data)
        raw = socket.create_connection((host, int(port)), timeout=20)
        with trust.wrap_socket(raw, server_hostname=host) as encrypted:
            send_all(encrypted, data)
    assert unharmed.server.returncode is None


def send_all(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    except OSError:  # the server had closed it already
        pass
