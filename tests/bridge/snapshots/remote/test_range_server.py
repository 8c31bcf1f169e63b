import contextlib
import datetime
import os
import socket
import ssl

import numpy as np
import pytest

from bridge.credentials import Tls
from bridge.snapshots.remote.range_server import listen
from bridge.snapshots.snapshot_format import SnapshotBusyError
from tests.bridge.snapshots.served import (
    OTHER_TOKEN,
    TOKEN,
    Clock,
    at,
    certificates,
    file_path,
    get,
    open_writer,
    publish,
    serving,
    values,
)
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support.processes import wait_until


@pytest.fixture(params=["http", "https"])
def scheme(request, tmp_path):
    """(what the server is given, what the client trusts)"""
    return (None, None) if request.param == "http" else certificates(tmp_path / "tls")


def test_ranges_are_the_bytes_of_the_slot(folder, writer, scheme):
    manifest, data = publish(writer, 1), values(1).tobytes()
    with serving(folder, token=TOKEN, tls=scheme[0]) as running:

        def ranged(text: str | None):
            headers = {} if text is None else {"Range": f"bytes={text}"}
            return get(running.url, file_path(manifest), token=TOKEN, ca=scheme[1], headers=headers)

        assert (ranged(None).status, ranged(None).body) == (200, data)
        for text, part in [("0-0", data[:1]), ("100-4999", data[100:5000]), ("79999-90000", data[-1:])]:
            answer = ranged(text)
            assert (answer.status, answer.body) == (206, part), text
            assert answer.headers["Server"] == "sluice"
        assert ranged("4096-8191").headers["Content-Range"] == "bytes 4096-8191/80000"
        for text in ("80000-", "9-3", "0-1,4-5", "x-y"):
            answer = ranged(text)
            assert (answer.status, answer.body) == (416, b""), text


def test_only_files_of_the_announced_version_are_there_and_nothing_is_told_besides(folder, writer):
    """A reader with the token asks for any other file (..., /etc/passwd, the slot being written) | 404 or 410"""
    publish(writer, 1)
    manifest = publish(writer, 2)
    (folder / "secret-0").write_bytes(b"secret")
    clock = Clock()
    with serving(folder, token=TOKEN, clock=clock) as running:
        for path, status in [
            ("/", 404),
            ("/v1", 404),
            ("/v1/run%201/0:2/manifest", 404),
            ("/v1/run%201/0:2/writer", 404),
            ("/v1/run%201/0:2/secret-0", 404),
            ("/v1/run%201/0:2/..%2Fw%2Fslot-1", 404),
            ("/v1/run%201/0:2/%2e%2e/slot-1", 404),
            ("/v1/run%201/0:2/slot-1%00", 404),
            ("/v1/run%201/0:2//etc/passwd", 404),
            ("/v1/run%201/0:2/../../../etc/passwd", 404),
            ("/v1/run%201/0:2/slot-0", 404),
            ("/v1/another/0:2/slot-1", 404),
            ("/v1/run%201/0:3/slot-1", 404),
            ("/v1/run%201/9999999999999999999999:2/slot-1", 404),
            ("/v1/run%201/x/slot-1", 404),
            ("/v1/run%201/0:1/slot-0", 410),
            ("/v1/run%201/0:2/slot-1", 200),
        ]:
            clock.now_s += 1.0
            answer = get(running.url, path, token=TOKEN)
            assert answer.status == status and (status == 200 or answer.body in (b"", b"404: Not Found")), path
            refused = get(running.url, path)
            assert (refused.status, refused.body) == (401, b""), path
        assert get(running.url, file_path(manifest), token=TOKEN, method="POST", body=b"x").status == 400
        assert get(running.url, file_path(manifest), token=TOKEN, method="DELETE").status == 405


def test_wrong_token_is_refused_without_a_word(folder, writer, caplog):
    """Wrong or missing token | 401 for whatever is asked, and no word of what is there"""
    manifest = publish(writer, 1)
    with serving(folder, token=TOKEN) as running:
        for headers in ({}, {"Authorization": "Basic x"}, {"Authorization": "Bearer \xff"}, {"Authorization": ""}):
            refused = get(running.url, file_path(manifest), headers=headers)
            assert (refused.status, refused.body) == (401, b"")
    assert caplog.text.count("token refused address=127.0.0.1") == 4


def test_too_many_wrong_tokens_are_not_even_compared(folder, writer):
    """Guessing tokens | after ten failures an address may try once a second, and is answered 429 else"""
    manifest = publish(writer, 1)
    clock = Clock()
    with serving(folder, token=TOKEN, clock=clock) as running:
        for _ in range(10):
            assert get(running.url, file_path(manifest), token=OTHER_TOKEN).status == 401
        assert get(running.url, file_path(manifest), token=TOKEN).status == 429
        clock.now_s += 1.0
        assert get(running.url, file_path(manifest), token=TOKEN).status == 200


def raw(url: str, request: bytes) -> bytes:
    host, port = url.split("//")[1].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while got := connection.recv(65536):
                answer += got
        return answer


WITH_TOKEN = f"GET /v1/run%201/0:1/slot-0 HTTP/1.1\r\nHost: x\r\nAuthorization: {TOKEN.header}\r\n".encode()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nRange: bytes=" + b"0" * 100_000 + b"-1\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"s" * 5000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"nonsense\r\n\r\n",
        WITH_TOKEN + b"Content-Length: 999999999999\r\n\r\n",
        WITH_TOKEN + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_request_too_large_or_malformed_gets_a_number_and_no_words(folder, writer, request_, caplog):
    """An oversized or odd request, with the token | an error or the file's own bytes; the server serves on"""
    manifest = publish(writer, 1)
    with serving(folder, token=TOKEN) as running:
        answer = raw(running.url, request_)
        assert answer or len(request_) > 1000
        if answer:  # who still sends when it is refused may not hear of it
            assert answer.split()[1] in (b"400", b"431") and answer.endswith(b"\r\n\r\n")
        assert b"aiohttp" not in answer
        assert get(running.url, file_path(manifest), token=TOKEN).status == 200
    assert "ssss" not in caplog.text and "0000000" not in caplog.text


@pytest.mark.heavy
def test_reader_that_stops_reading_is_cut_off_and_the_writer_goes_on(tmp_path, scheme):
    """Its transfer is larger than all that the kernel buffers."""
    folder = tmp_path / "w"
    writer = open_writer(folder, lock_timeout_s=20.0)
    manifest = write_whole(writer, at(2), {"w": np.zeros(16 * 2**20, np.float32)}, dtype="float32")
    with serving(folder, tls=scheme[0], reader_grace_s=0.3) as running:
        host, port = running.url.split("//")[1].split(":")
        stuck = socket.create_connection((host, int(port)))
        if scheme[1] is not None:
            context = ssl.create_default_context(cafile=str(scheme[1].ca))
            stuck = context.wrap_socket(stuck, server_hostname=host)
        stuck.sendall(f"GET {file_path(manifest)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert stuck.recv(10) == b"HTTP/1.1 2"
        publish(writer, 3)
        publish(writer, 4)  # waits for the reader of version 2, no longer than it may take
        assert get(running.url, file_path(manifest), ca=scheme[1]).status == 410
        with pytest.raises((ConnectionError, ssl.SSLError)):
            while stuck.recv(2**20):
                pass
            raise ConnectionError("cut off in the middle")
        stuck.close()
    writer.close()


def test_many_readers_that_stand_still_hold_up_nobody_else(tmp_path):
    folder, many = tmp_path / "w", 2 * (os.cpu_count() or 1) + 4
    writer = open_writer(folder)
    data = np.random.default_rng(0).standard_normal(4 * 2**20).astype(np.float32)
    manifest = write_whole(writer, at(1), {"w": data}, dtype="float32")
    with serving(folder) as running, contextlib.ExitStack() as stuck:
        host, port = running.url.split("//")[1].split(":")
        for _ in range(many):
            connection = stuck.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(f"GET {file_path(manifest)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert connection.recv(10) == b"HTTP/1.1 2"
        assert get(running.url, file_path(manifest)).body == data.tobytes()
        held = running.server.slots._held  # the server notices the end of the whole read a moment after its reader
        wait_until(lambda: sum(len(h.aborts) for h in held.values()) == many, "the others alone are held")
    writer.close()


@pytest.mark.heavy
def test_reader_that_stops_reading_is_cut_off_also_when_nothing_newer_comes(tmp_path):
    folder = tmp_path / "w"
    writer = open_writer(folder)
    manifest = write_whole(writer, at(1), {"w": np.zeros(16 * 2**20, np.float32)}, dtype="float32")
    with serving(folder, stall_s=0.3) as running:
        host, port = running.url.split("//")[1].split(":")
        with socket.create_connection((host, int(port))) as stuck:
            stuck.sendall(f"GET {file_path(manifest)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert stuck.recv(10) == b"HTTP/1.1 2"
            wait_until(lambda: not any(h.aborts for h in running.server.slots._held.values()), "it is cut off")
    writer.close()


@pytest.mark.heavy
def test_slow_reader_gets_its_version_whole_and_the_writer_waits_for_it(tmp_path):
    folder = tmp_path / "w"
    writer = open_writer(folder)
    large = np.random.default_rng(0).standard_normal(2 * 2**20).astype(np.float32)
    manifest = write_whole(writer, at(1), {"w": large}, dtype="float32")
    with serving(folder) as running:
        host, port = running.url.split("//")[1].split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            slow.sendall(f"GET {file_path(manifest)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            got = slow.recv(1000)
            publish(writer, 2)
            with pytest.raises(SnapshotBusyError):
                publish(writer, 3)
            while block := slow.recv(2**20):
                got += block
        assert got.partition(b"\r\n\r\n")[2] == large.tobytes()
        wait_until(lambda: not running.server.slots._held, "the slot is let go")
        publish(writer, 3)
    writer.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:80", "example.org:443"])
def test_address_that_others_reach_needs_tls_and_a_token(tmp_path, address):
    """No TLS or no token off loopback | the server does not start, and says what is missing"""
    server, _ = certificates(tmp_path)
    for scheme, token in (("http", None), ("http", TOKEN), ("https", None)):
        with pytest.raises(ValueError, match="is reachable from other machines.*SLUICE_TOKEN") as caught:
            listen(address, scheme=scheme, token=token, tls=server)
        assert "\n" not in str(caught.value) and "0123456789abcdef" not in str(caught.value)


def test_address_of_all_interfaces_with_tls_and_a_token_is_served(folder, writer, tmp_path):
    manifest = publish(writer, 1)
    server, client = certificates(tmp_path)
    with serving(folder, token=TOKEN, tls=server, address="0.0.0.0:0") as running:
        url = running.url.replace("0.0.0.0", "127.0.0.1")
        assert get(url, file_path(manifest), token=TOKEN, ca=client).body == values(1).tobytes()


@pytest.mark.parametrize("address", ["", "127.0.0.1", ":80", "127.0.0.1:x", "127.0.0.1:99999"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(ValueError):
        listen(address, scheme="http", token=None, tls=Tls())


def test_address_in_use_and_missing_certificate_are_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="SLUICE_TLS_CERT"):
        listen("127.0.0.1:0", scheme="https", token=TOKEN, tls=Tls())
    (tmp_path / "junk.pem").write_text("junk")
    junk = Tls(certificate=tmp_path / "junk.pem", key=tmp_path / "junk.pem")
    with pytest.raises(ValueError, match="cannot be used"):
        listen("127.0.0.1:0", scheme="https", token=TOKEN, tls=junk)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match="cannot be served at 127.0.0.1"),
    ):
        listen(f"127.0.0.1:{taken.getsockname()[1]}", scheme="http", token=None, tls=Tls())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_old_tls_is_refused(folder, writer, tmp_path):
    server, client = certificates(tmp_path)
    with serving(folder, tls=server) as running:
        context = ssl.create_default_context(cafile=str(client.ca))
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        host, port = running.url.split("//")[1].split(":")
        with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain, server_hostname=host)


def test_what_is_no_tls_and_an_expired_certificate_get_nothing(folder, writer, tmp_path):
    """Bytes that are no TLS, or no HTTP | the connection is closed; the server serves on"""
    manifest = publish(writer, 1)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    server, client = certificates(tmp_path, not_after=past)
    with serving(folder, tls=server) as running:
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(70_000), b"\x16\x03\x01\xff\xff" + b"x" * 200):
            assert b"200" not in raw(running.url, data)
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            get(running.url, file_path(manifest), ca=client)
