"""A TCP proxy on loopback whose connections can be stalled: they stay open and carry nothing."""

import asyncio
import contextlib
import threading
from collections.abc import Generator

_BLOCK_BYTES = 64 * 1024


class Proxy:
    """Passes bytes on between whoever connects to `address` and a target; `proxy` runs it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self.address = ("", 0)

    def stall(self) -> None:
        """From here on nothing goes on; returns once that is so."""
        self._call(self._flows.clear)

    def flow(self) -> None:
        """Undoes `stall`."""
        self._call(self._flows.set)

    def run(self, listens: threading.Event) -> None:
        """Serves until `stop`."""
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.address = server.sockets[0].getsockname()
        listens.set()
        self._loop.run_forever()

    def stop(self) -> None:
        """Ends `run`; connections end with the process."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, onward))
                ways.create_task(self._pass(onward_reader, writer))
        except* OSError:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            await self._flows.wait()
            writer.write(block)
            await writer.drain()
        writer.close()

    def _call(self, function) -> None:
        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()


@contextlib.contextmanager
def proxy(target: tuple[str, int]) -> Generator[Proxy]:
    """A proxy to `target` for the block's duration."""
    made, listens = Proxy(target), threading.Event()
    thread = threading.Thread(target=made.run, args=(listens,))
    thread.start()
    listens.wait()
    try:
        yield made
    finally:
        made.stop()
        thread.join()
