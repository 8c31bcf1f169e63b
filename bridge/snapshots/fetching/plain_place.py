"""A server on this machine as a place to read from: Python's own client, which receives straight into what is filled.

Measured on loopback, seconds of CPU for a GB, reader and server: 0.17 and 0.17 here, 0.13 and 0.15 between bare sockets
in C, 0.59 and 0.25 by obstore, whose blocks are copied on the way. Encrypted, where Python is asked for each record of
16 KiB and holds its lock 60,000 times a GB, this would take 0.74, and obstore 0.95 without Python's lock.
"""

import asyncio
import contextlib
import functools
import http.client
import re
import socket
import struct
import urllib.parse
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from bridge.secrets import Token
from bridge.snapshots.fetching.places import BrokenError, NotThereError, RefusedError

_BLOCK_BYTES = 32 * 2**20
_BLOCK_S = 0.1
"""A block is received by one call into the kernel: all of it, or what has come when so much time was spent waiting.
Measured: blocks of 16 MiB take a tenth more CPU, those of 4 MiB half as much again."""
_BUFFER_BYTES = 2**20
"""What the kernel keeps of a connection: it stays in the processor's cache (`bridge.snapshots.serving.sending`)."""
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
