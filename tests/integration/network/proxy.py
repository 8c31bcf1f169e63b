"""A TCP proxy between two machines: it delays, slows down, stalls and cuts the connections that go through it."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Generator

from tests.integration.network.namespaces import Host

_BLOCK_BYTES = 64 * 1024


class Proxy:
    """Passes bytes on between whoever connects and a target; its methods may be called from any thread."""

    def __init__(self, target: tuple[str, int]) -> None:
        """Not listening yet (`proxy`)."""
        self._target = target
        self.delay_s = 0.0
        """How much later a block goes on, each way."""
        self.rate_bytes_per_s = 0.0
        """Of each connection from the target to the client; 0 for no bound."""
        self.refuses = False
        """Whether new connections are reset at once."""
        self.num_bytes = 0
        """That went from the target to clients."""
        self.num_connections = 0
        """Accepted since the start."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flows: asyncio.Event | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.address = ("", 0)

    @property
    def num_open(self) -> int:
        """Connections open now."""
        return len(self._open) // 2

    def cut(self) -> None:
        """Resets every connection, in the middle of whatever it carries."""
        self._call(self._cut)

    def stall(self) -> None:
        """From here on nothing goes on, and connections stay open."""
        self._call(lambda: self._flows and self._flows.clear())

    def flow(self) -> None:
        """Undoes `stall`."""
        self._call(lambda: self._flows and self._flows.set())

    async def serve(self, listening: socket.socket, stop: asyncio.Event) -> None:
        """Until `stop`."""
        self._loop, self._flows = asyncio.get_running_loop(), asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._connected, sock=listening)
        await stop.wait()
        server.close()
        self._cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.refuses:
            _reset(writer)
            return
        try:
            onward_reader, onward = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        ends = {writer, onward}
        self._open |= ends
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, onward, is_download=False))
                ways.create_task(self._pass(onward_reader, writer, is_download=True))
        except* OSError:
            pass
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_download: bool) -> None:
        assert self._flows is not None
        while block := await reader.read(_BLOCK_BYTES):
            await self._flows.wait()
            rate = self.rate_bytes_per_s if is_download else 0.0
            if wait_s := self.delay_s + (len(block) / rate if rate else 0.0):
                await asyncio.sleep(wait_s)
            writer.write(block)
            await writer.drain()
            if is_download:
                self.num_bytes += len(block)
        if writer.can_write_eof():
            writer.write_eof()

    def _cut(self) -> None:
        for end in self._open:
            _reset(end)

    def _call(self, function: object) -> None:
        assert self._loop is not None and callable(function)
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()


def _reset(end: asyncio.StreamWriter) -> None:
    """Closes a connection by a RST: a peer that reads is told of an error, not of an end."""
    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


@contextlib.contextmanager
def proxy(target: tuple[str, int], *, on: Host | None = None, port: int = 0) -> Generator[Proxy]:
    """A proxy to `target` for the block's duration, at `address`: on a host of a network, else on loopback."""
    made = Proxy(target)
    listens = threading.Event()
    stop_loop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    errors: list[BaseException] = []

    async def serve() -> None:
        stop = asyncio.Event()
        stop_loop.append((asyncio.get_running_loop(), stop))
        with socket.create_server((on.address if on is not None else "127.0.0.1", port)) as listening:
            made.address = listening.getsockname()
            serving = asyncio.create_task(made.serve(listening, stop))
            await asyncio.sleep(0)
            listens.set()
            await serving

    def run() -> None:
        try:
            if on is not None:
                on.enter()
            asyncio.run(serve())
        except BaseException as e:
            errors.append(e)
        finally:
            listens.set()

    thread = threading.Thread(target=run)
    thread.start()
    listens.wait()
    try:
        if errors:
            raise errors[0]
        yield made
    finally:
        if stop_loop:
            loop, stop = stop_loop[0]
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)
        thread.join()
