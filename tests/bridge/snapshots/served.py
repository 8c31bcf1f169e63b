"""Servers for the tests of what crosses machines: ours, in a thread of its own, and one that misbehaves as told."""

import asyncio
import contextlib
import dataclasses
import datetime
import http.client
import pathlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import numpy as np
import trustme

from bridge.credentials import Tls, Token
from bridge.rollout_types import Version
from bridge.snapshots.remote.range_server import SnapshotServer, listen, url_of
from bridge.snapshots.snapshot_format import sign, version_url
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import Announcement, WeightManifest
from tests.bridge.snapshots.whole import write_whole

RUN, TOKENIZER = "run 1", "t"
TOKEN, OTHER_TOKEN = Token("0123456789abcdef" * 2), Token("fedcba9876543210" * 2)
CHUNK_BYTES = 4096
NUM_VALUES = 20_000
"""20 chunks, the last one short."""


def at(step: int, incarnation: int = 0) -> Version:
    return Version(incarnation=incarnation, step=step)


def values(step: int) -> np.ndarray:
    """No chunk of it equals another's, nor the same one's of another step."""
    return np.random.default_rng(step).standard_normal(NUM_VALUES).astype(np.float32)


def open_writer(
    folder: pathlib.Path, *, token: Token | None = None, lock_timeout_s: float = 0.05, has_spare: bool = False
) -> SnapshotWriter:
    return SnapshotWriter(
        folder,
        run=RUN,
        tokenizer_hash=TOKENIZER,
        token=token,
        chunk_bytes=CHUNK_BYTES,
        lock_timeout_s=lock_timeout_s,
        has_spare=has_spare,
    )


def publish(writer: SnapshotWriter, step: int) -> WeightManifest:
    return write_whole(writer, at(step), {"w": values(step)}, dtype="float32")


def announced(manifest: WeightManifest, *bases: str, token: Token = TOKEN) -> Announcement:
    sources = tuple(version_url(b, manifest.run, manifest.version) for b in bases)
    return sign(Announcement(manifest=manifest, sources=sources), token)


def certificates(
    folder: pathlib.Path, *, host: str = "127.0.0.1", not_after: datetime.datetime | None = None
) -> tuple[Tls, Tls]:
    """What a server shows, and what a client trusts."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    made = authority.issue_cert(host, not_after=not_after)
    certificate, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(made.private_key_pem.bytes())
    authority.cert_pem.write_to_path(ca)
    return Tls(certificate=certificate, key=key), Tls(ca=ca)


@dataclasses.dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Running:
    server: SnapshotServer
    url: str
    loop: asyncio.AbstractEventLoop
    end: Callable[[], None]


@contextlib.contextmanager
def serving(
    folder: pathlib.Path,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    reader_grace_s: float = 10.0,
    slow_reader_grace_s: float = 0.0,
    address: str = "127.0.0.1:0",
    **kwargs,
) -> Iterator[Running]:
    """Our server, in a thread."""
    scheme = "http" if tls is None else "https"
    listener, context = listen(address, scheme=scheme, token=token, tls=tls or Tls())
    server = SnapshotServer(
        folder,
        listener,
        token=token,
        tls=context,
        reader_grace_s=reader_grace_s,
        slow_reader_grace_s=slow_reader_grace_s,
        **kwargs,
    )
    url = url_of(listener, scheme)
    started: threading.Event = threading.Event()
    parts: list = []

    async def body() -> None:
        task = asyncio.create_task(server.run())
        parts.extend((asyncio.get_running_loop(), task))
        started.set()
        await asyncio.wait({task})

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    started.wait()
    loop, task = parts

    def end() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
            thread.join()

    try:
        yield Running(server, url, loop, end)
    finally:
        end()


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def get(
    url: str,
    path: str,
    *,
    token: Token | None = None,
    ca: Tls | None = None,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Answer:
    """One request by Python's own client: an oracle that shares no code with ours."""
    host = url.split("//")[1]
    if ca is not None:
        connection = http.client.HTTPSConnection(
            host, context=ssl.create_default_context(cafile=str(ca.ca)), timeout=10
        )
    else:
        connection = http.client.HTTPConnection(host, timeout=10)
    shown = {"Authorization": token.header} if token else {}
    try:
        connection.request(method, path, body=body, headers=shown | (headers or {}))
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def file_path(manifest: WeightManifest, name: str | None = None) -> str:
    return version_url("", manifest.run, manifest.version) + "/" + (name or manifest.shards[0].file.name)


@dataclasses.dataclass
class Request:
    """One range, as the misbehaving server sees it; `start` and `end` in bytes."""

    number: int
    start: int
    end: int
    authorization: str
    path: str


class ScriptedServer:
    """Serves bytes by ranges, except where `script` has another answer for a request."""

    def __init__(self, data: bytes, script: Callable[[Request, socket.socket], bytes | None] | None = None) -> None:
        """`script` may return the bytes to send in place of the right body, or answer itself and return None."""
        self.data, self.script = data, script
        self.requests: list[Request] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def ranges(self) -> list[tuple[int, int]]:
        return [(r.start, r.end) for r in self.requests]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Cuts every connection."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while head := self._head(connection):
                where = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", head)
                assert where is not None
                shown = re.search(rb"(?i)authorization: ([^\r]*)", head)
                with self._lock:
                    request = Request(
                        len(self.requests),
                        int(where[1]),
                        int(where[2]) + 1,
                        shown[1].decode() if shown else "",
                        head.split()[1].decode(),
                    )
                    self.requests.append(request)
                body: bytes | None = self.data[request.start : request.end]
                if self.script is not None:
                    body = self.script(request, connection)
                    if body is None:
                        return
                send_range(connection, request, body, total=len(self.data))

    def _head(self, connection: socket.socket) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            got = connection.recv(65536)
            if not got:
                return b""
            head += got
        return head


def send_range(
    connection: socket.socket, request: Request, body: bytes, *, total: int, length: int | None = None
) -> None:
    """Sends a range with whatever body, and whatever length it says to have."""
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {request.start}-{request.end - 1}/{total}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
