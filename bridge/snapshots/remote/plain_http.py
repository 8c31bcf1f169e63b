"""Plain HTTP: files received from a server, and sent by one.

Measured on loopback, seconds of CPU for a GB, reader and server: 0.17 and 0.17 here, 0.13 and 0.15 between bare sockets
in C, 0.59 and 0.25 by obstore, whose blocks are copied on the way. Encrypted, where Python is asked for each record of
16 KiB and holds its lock 60,000 times a GB, this would take 0.74, and obstore 0.95 without Python's lock.

Measured on loopback, two cores, seconds of CPU for a GB, sender and reader: sendfile from tmpfs 0.26 and 0.20, since it
hands over 4 KiB pages one by one; `send` of mapped memory 0.16 and 0.10, and 2 to 3 times the speed. Buffers of 1 MiB
on both sides are best: what is on its way stays in the processor's cache.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import re
import select
import socket
import struct
import urllib.parse
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from bridge.credentials import Token
from bridge.snapshots.remote.download import BrokenError, NotThereError, RefusedError

_BLOCK_BYTES = 32 * 2**20
_BLOCK_S = 0.1
"""A block is received by one call into the kernel: all of it, or what has come when so much time was spent waiting.
Measured: blocks of 16 MiB take a tenth more CPU, those of 4 MiB half as much again."""
_BUFFER_BYTES = 2**20
"""What the kernel keeps of a connection: it stays in the processor's cache (`bridge.snapshots.remote.range_server`)."""
_EARLY_BYTES = 2**16
"""More than the client's own buffer holds."""
_CONNECT_S = 5.0
_TIMEVAL = struct.Struct("@ll")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/\d+")


R = TypeVar("R")


class PlainPlace:
    """Files under an http URL, by ranges, over connections that are kept for the next range."""

    def __init__(self, url: str, *, token: Token | None = None) -> None:
        """Nothing is asked of it yet; `token` is shown to whoever serves there."""
        parts = urllib.parse.urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._headers = {} if token is None else {"Authorization": token.header}
        self._idle: list[_Connection] = []

    async def read(self, name: str, start: int, into: memoryview) -> AsyncGenerator[int]:
        """As `Place.read`."""
        position, size = 0, len(into)
        connection = None
        try:
            connection, response = await self._answer(name, start, start + size)
            _check(response, start, start + size)
            yield 0
            while position < size:
                with into[
                    position : position + _BLOCK_BYTES
                ] as block:  # let go here: a thread keeps its work a moment longer
                    num_bytes = await connection.do(functools.partial(connection.receive, block))
                if num_bytes == 0:
                    break
                position += num_bytes
                yield num_bytes
        except OSError as e:
            raise BrokenError(e.strerror or type(e).__name__) from None
        except http.client.HTTPException as e:  # its words repeat what the server sent
            raise BrokenError(f"answered what is no HTTP: {type(e).__name__}") from None
        finally:
            if connection is not None and position == size and connection.can_be_asked_again:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    def close(self) -> None:
        """As `Place.close`."""
        while self._idle:
            self._idle.pop().close()

    async def _answer(self, name: str, start: int, end: int) -> "tuple[_Connection, http.client.HTTPResponse]":
        path = f"{self._path}/{urllib.parse.quote(name)}"
        headers = self._headers | {"Range": f"bytes={start}-{end - 1}"}
        while self._idle:
            with contextlib.suppress(ConnectionError):  # the server closed it meanwhile
                connection = self._idle.pop()
                return connection, await connection.ask(path, headers)
        connection = _Connection(self._host, self._port)
        return connection, await connection.ask(path, headers)


class _Connection:
    """A connection whose blocking calls run in threads, and end at once when whoever waits for them is cancelled."""

    def __init__(self, host: str, port: int | None) -> None:
        self._client = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._is_drained = self._is_cut = False

    @property
    def can_be_asked_again(self) -> bool:
        """Whether the server keeps the connection open; of the last answer nothing is left."""
        return self._client.sock is not None and not self._is_cut

    async def ask(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Asks for a file; closes the connection where no answer comes."""

        def ask() -> http.client.HTTPResponse:
            if self._socket is None:
                self._client.connect()
                connected: socket.socket = self._client.sock
                # How long is waited from here on is the event loop's to say: without it, no call polls first.
                connected.settimeout(None)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                self._socket = connected
            if self._is_cut:
                raise ConnectionAbortedError
            if self._response is not None:
                self._response.close()
            self._wait_at_most(0)
            self._client.request("GET", path, headers=headers)
            self._is_drained = False
            return self._client.getresponse()

        try:
            self._response = await self.do(ask)
        except BaseException:
            self.close()
            raise
        return self._response

    def receive(self, block: memoryview) -> int:
        """Receives what comes within a moment, and at least a byte; 0 at the end of the answer. Blocks its thread."""
        assert self._socket is not None and self._response is not None
        if not self._is_drained:
            # What came together with the answer's headers lies in the client's buffer, and is less than a block.
            early = self._response.read1(min(len(block), _EARLY_BYTES))
            block[: len(early)] = early
            self._is_drained = True
            if not self._response.isclosed():  # by itself, at its end
                self._wait_at_most(_BLOCK_S)
            return len(early)
        while True:
            with contextlib.suppress(BlockingIOError):  # nothing yet
                return self._socket.recv_into(block, 0, socket.MSG_WAITALL)

    def _wait_at_most(self, wait_s: float) -> None:
        """Bounds how long the kernel waits in one call; 0: it does not."""
        assert self._socket is not None
        microseconds = round(wait_s * 1e6)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, microseconds))

    async def do(self, work: Callable[[], R]) -> R:
        """Runs what blocks on the connection; a cancelled call cuts it, and has ended when this has."""
        running = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            # How it ends then is nobody's concern, and is not to be logged as if it were.
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await asyncio.wait({running})
            raise

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._client.close()


def _check(response: http.client.HTTPResponse, start: int, end: int) -> None:
    """Refuses what is not the range that was asked for. A redirect is not followed: it would take the token along."""
    status = response.status
    if status == 404:
        raise NotThereError("not found")
    if status == 410:
        raise NotThereError("superseded")
    if status in (401, 403):
        raise RefusedError(f"refused the token or the credentials: status {status}")
    if status == 200:
        raise RefusedError("does not serve ranges")
    if 300 <= status < 400:
        raise RefusedError(f"redirects elsewhere, which is not followed: status {status}")
    if status != 206:
        raise BrokenError(f"answered with status {status}")
    where = _RANGE.fullmatch(response.getheader("Content-Range", ""))
    if where is None or (int(where[1]), int(where[2])) != (start, end - 1):
        raise BrokenError(f"sent another range than bytes {start} to {end}")
    if response.length != end - start:
        raise BrokenError(f"sent a body that does not have the {end - start} bytes of its range")


SEND_BLOCK_BYTES = 4 * 2**20
_SLICE_BYTES = 32 * 2**20
"""What a thread sends of one transfer before it takes the next one's turn."""
_LINGER_MS = 5
"""How long a thread waits for a reader that takes no more just now. One that needs longer is waited for without it."""
SEND_BUFFER_BYTES = 2**20


class Transfer:
    """What is sent on a connection, and may be cut off at any time. Of the connection's event loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Nothing is sent yet."""
        self.transport = transport
        self._own: socket.socket | None = None

    def connection(self) -> socket.socket:
        """A socket of our own for the connection; the caller closes it.

        The transport may close its descriptor, and another connection get the number.

        Raises:
          OSError: the transport has closed its own already.
        """
        own: socket.socket = self.transport.get_extra_info("socket").dup()
        self._own = own
        return own

    def cut(self) -> None:
        """Ends the connection at once: when this returns, no thread sends on it any more."""
        # Ours too: the transport closes its own when the reader shuts its side, and a thread sends on all the same.
        for connection in (self._own, self.transport.get_extra_info("socket")):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.transport.abort()


class PlainSender:
    """Sends over connections that are not encrypted, by a few threads, however many readers are slow."""

    def __init__(self, *, stall_s: float, num_threads: int) -> None:
        """A reader that takes less than a block of 4 MiB in `stall_s` is given up."""
        self._stall_s = stall_s
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-send")

    async def send(self, transfer: Transfer, data: memoryview) -> None:
        """Sends all of `data` on a connection whose transport has nothing left to send itself.

        Cut it off by `Transfer.cut`: from then on nothing more of `data` is read, whatever a thread is at.

        Raises:
          TimeoutError: the reader does not read.
          OSError: it is gone, or the memory is.
        """
        connection = transfer.connection()
        work: concurrent.futures.Future[int] | None = None
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            position = renewed = 0
            async with asyncio.timeout(self._stall_s) as limit:
                while position < len(data):
                    if transfer.transport.is_closing():
                        raise ConnectionResetError
                    work = self._threads.submit(_push, connection, data[position : position + _SLICE_BYTES])
                    num_sent = await _result(work, connection)
                    position += num_sent
                    if position - renewed >= SEND_BLOCK_BYTES:
                        renewed = position
                        limit.reschedule(asyncio.get_running_loop().time() + self._stall_s)
                    if num_sent < min(_SLICE_BYTES, len(data) - position + num_sent):
                        await _until_writable(connection)
        finally:
            if work is None:
                connection.close()
            else:
                work.add_done_callback(lambda _: connection.close())

    def close(self) -> None:
        """Ends the threads; every transfer has ended."""
        self._threads.shutdown()


def _push(connection: socket.socket, data: memoryview) -> int:
    """Sends until all is gone, or the reader takes no more for a moment; returns how many bytes went."""
    position = 0
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while position < len(data):
        try:
            position += connection.send(data[position : position + SEND_BLOCK_BYTES])
        except BlockingIOError:
            if not poll.poll(_LINGER_MS):
                break
    return position


async def _result(work: concurrent.futures.Future[int], connection: socket.socket) -> int:
    """What a thread returns; who is cancelled meanwhile cuts the connection, and the thread has ended when this has."""
    running = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        # How it ends then is nobody's concern, and is not to be logged as if it were.
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if not work.cancel():
            await asyncio.wait({running})
        raise


async def _until_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(connection, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connection)
