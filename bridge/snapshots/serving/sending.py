"""Bytes of a slot to a reader: straight from its mapped memory where plain, block by block where encrypted.

Measured on loopback, two cores, seconds of CPU for a GB, sender and reader: sendfile from tmpfs 0.26 and 0.20, since it
hands over 4 KiB pages one by one; `send` of mapped memory 0.16 and 0.10, and 2 to 3 times the speed. Buffers of 1 MiB
on both sides are best: what is on its way stays in the processor's cache.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import select
import socket

from aiohttp import web

from bridge.snapshots.serving.held_slots import OpenFile

_BLOCK_BYTES = 4 * 2**20
_SLICE_BYTES = 32 * 2**20
"""What a thread sends of one transfer before it takes the next one's turn."""
_LINGER_MS = 5
"""How long a thread waits for a reader that takes no more just now. One that needs longer is waited for without it."""
_BUFFER_BYTES = 2**20
_TLS_BYTES = 256 * 2**10
"""Encrypted blocks are copied three times on the way, best in cache: measured 64 KiB to 4 MiB. Python's TLS in threads,
from mapped memory, takes 0.6 s of CPU for a GB, this 0.66; AES-128 in place of AES-256 is a tenth less."""


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
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            position = renewed = 0
            async with asyncio.timeout(self._stall_s) as limit:
                while position < len(data):
                    if transfer.transport.is_closing():
                        raise ConnectionResetError
                    work = self._threads.submit(_push, connection, data[position : position + _SLICE_BYTES])
                    num_sent = await _result(work, connection)
                    position += num_sent
                    if position - renewed >= _BLOCK_BYTES:
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


async def send_encrypted(response: web.StreamResponse, file: OpenFile, start: int, end: int, *, stall_s: float) -> None:
    """Sends a part of a file through the connection's TLS.

    Raises:
      TimeoutError: the reader takes less than a block in `stall_s`.
      ConnectionResetError: the file is shorter than it was announced.
    """
    while start < end:
        block = os.pread(file.fd, min(_TLS_BYTES, end - start), start)
        if not block:
            raise ConnectionResetError("the slot is shorter than it was announced")
        async with asyncio.timeout(stall_s):
            await response.write(block)
        start += len(block)


def _push(connection: socket.socket, data: memoryview) -> int:
    """Sends until all is gone, or the reader takes no more for a moment; returns how many bytes went."""
    position = 0
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while position < len(data):
        try:
            position += connection.send(data[position : position + _BLOCK_BYTES])
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
